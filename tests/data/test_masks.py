"""Loss masks of kept conversations against truth written by hand: «...» marks what the target would have produced."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizer

from eyas.data import masks
from eyas.data.masks import kept_samples
from eyas.data.render import Renderer
from eyas.data.shapes import Conversation, RowError, answered, read_row
from eyas.errors import InputError

from .templates import STYLES
from .tiny import byte_tokenizer


def conversation(*turns: str, reasoning: bool = False) -> Conversation:
    """user, assistant, user, ...; an assistant turn "think|answer" carries reasoning_content."""
    messages: list[dict[str, Any]] = []
    for i, text in enumerate(turns):
        thought, _, answer = text.rpartition("|")
        message: dict[str, Any] = {"role": "user" if i % 2 == 0 else "assistant", "content": answer}
        if thought:
            message["reasoning_content"] = thought
        messages.append(message)
    return answered(read_row({"messages": messages}))


def truth(tokenizer: Any, marked: str) -> tuple[list[int], list[bool]]:
    """Ids and mask of text in which «...» is supervised. Byte tokens: pieces tokenize as the whole does."""
    ids: list[int] = []
    mask: list[bool] = []
    for i, piece in enumerate(part for p in marked.split("«") for part in p.split("»")):
        new = tokenizer(piece, add_special_tokens=False)["input_ids"]
        ids += new
        mask += [i % 2 == 1] * len(new)
    return ids, mask


def samples_of(name: str, c: Conversation, max_length: int = 500) -> tuple[Any, list[Any], Counter[str]]:
    style = STYLES[name]
    tokenizer = style.tokenizer()
    render = Renderer(tokenizer, [tokenizer.convert_tokens_to_ids(s) for s in style.stops])
    notes: Counter[str] = Counter()
    return tokenizer, kept_samples(render, c, max_length, notes), notes


CALL = {"function": {"name": "f", "arguments": '{"x": 1}'}}


def called(**thinking: Any) -> list[dict[str, Any]]:
    """A question, a tool call with or without thinking, the tool's result, the answer."""
    return [
        {"role": "user", "content": "go"},
        {"role": "assistant", "content": None, "tool_calls": [CALL], **thinking},
        {"role": "tool", "content": "7"},
        {"role": "assistant", "content": "seven"},
    ]


def said(answer: str, **thinking: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": "hi"}, {"role": "assistant", "content": answer, **thinking}]


def kept(messages: list[dict[str, Any]]) -> Conversation:
    return answered(read_row({"messages": messages}))


TWO = conversation("hi", "yes", "and", "no")
THINKING = conversation("hi", "why|yes", "and", "so|no")

CASES = [
    (
        "chatml",
        TWO,
        ["<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n«yes<|im_end|>»\n"
         "<|im_start|>user\nand<|im_end|>\n<|im_start|>assistant\n«no<|im_end|>»"],
        masks.WHOLE,
    ),
    (
        "llama3",
        TWO,
        ["<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nhi<|eot_id|>"
         "<|start_header_id|>assistant<|end_header_id|>\n\n«yes<|eot_id|>»"
         "<|start_header_id|>user<|end_header_id|>\n\nand<|eot_id|>"
         "<|start_header_id|>assistant<|end_header_id|>\n\n«no<|eot_id|>»"],
        masks.WHOLE,
    ),
    (
        "qwen3",
        THINKING,
        ["<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n«<think>\nwhy\n</think>\n\nyes<|im_end|>»",
         "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nyes<|im_end|>\n"
         "<|im_start|>user\nand<|im_end|>\n<|im_start|>assistant\n«<think>\nso\n</think>\n\nno<|im_end|>»"],
        masks.SPLIT,
    ),
    (
        "qwen3",  # without thinking: the empty block appears in the last turn alone
        TWO,
        ["<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n«<think>\n\n</think>\n\nyes<|im_end|>»",
         "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nyes<|im_end|>\n"
         "<|im_start|>user\nand<|im_end|>\n<|im_start|>assistant\n«<think>\n\n</think>\n\nno<|im_end|>»"],
        masks.SPLIT,
    ),
    (
        "deepseek_r1",  # the open think block of the generation prompt is in no rendering, but it is served
        TWO,
        ["<|begin|><|User|>hi<|Assistant|><think>\n«yes<|end|>»",
         "<|begin|><|User|>hi<|Assistant|>yes<|end|><|User|>and<|Assistant|><think>\n«no<|end|>»"],
        masks.INEXACT,
    ),
    (
        "deepseek_v31",
        TWO,
        ["<|begin|><|User|>hi<|Assistant|></think>«yes<|end|>»<|User|>and<|Assistant|></think>«no<|end|>»"],
        masks.WHOLE,
    ),
    (
        "kimi",
        THINKING,
        ["<|im_user|>user<|im_middle|>hi<|im_end|><|im_assistant|>assistant<|im_middle|>«<think>why</think>yes<|im_end|>»",
         "<|im_user|>user<|im_middle|>hi<|im_end|><|im_assistant|>assistant<|im_middle|><think></think>yes<|im_end|>"
         "<|im_user|>user<|im_middle|>and<|im_end|><|im_assistant|>assistant<|im_middle|>«<think>so</think>no<|im_end|>»"],
        masks.SPLIT,
    ),
    (
        "kimi",
        TWO,
        ["<|im_user|>user<|im_middle|>hi<|im_end|><|im_assistant|>assistant<|im_middle|>«<think></think>yes<|im_end|>»"
         "<|im_user|>user<|im_middle|>and<|im_end|><|im_assistant|>assistant<|im_middle|>«<think></think>no<|im_end|>»"],
        masks.WHOLE,
    ),
    (
        "glm",  # the next header is the stop token, also where no next turn follows
        TWO,
        ["[gMASK]<|user|>\nhi<|assistant|>\n«<think></think>\nyes<|user|>»\nand<|assistant|>\n«<think></think>\nno<|user|>»"],
        masks.WHOLE,
    ),
    (
        "glm",
        THINKING,
        ["[gMASK]<|user|>\nhi<|assistant|>\n«<think>why</think>\nyes<|user|>»",
         "[gMASK]<|user|>\nhi<|assistant|>\n<think></think>\nyes<|user|>\nand<|assistant|>\n"
         "«<think>so</think>\nno<|user|>»"],
        masks.SPLIT,
    ),
    (
        "glm_tools",  # a call ends where its result begins, also where none follows
        kept(called()),
        ["[gMASK]<|user|>\ngo<|assistant|>\n«<tool_call>f</tool_call><|observation|>»\n7<|assistant|>\n«seven<|user|>»"],
        masks.WHOLE,
    ),
    (
        "glm_tools",
        kept(called()[:2]),
        ["[gMASK]<|user|>\ngo<|assistant|>\n«<tool_call>f</tool_call><|observation|>»"],
        masks.WHOLE,
    ),
    (
        "phi3",  # the first stop token ends the answer, though another one follows
        TWO,
        ["<|user|>\nhi<|end|>\n<|assistant|>\n«yes<|end|>»\n<|user|>\nand<|end|>\n<|assistant|>\n«no<|end|>»"],
        masks.WHOLE,
    ),
    (
        "gpt_oss",  # the stop token of the last answer is not in the history
        TWO,
        ["<|start|>user<|message|>hi<|end|><|start|>assistant«<|channel|>final<|message|>yes<|return|>»",
         "<|start|>user<|message|>hi<|end|><|start|>assistant<|channel|>final<|message|>yes<|end|>"
         "<|start|>user<|message|>and<|end|><|start|>assistant«<|channel|>final<|message|>no<|return|>»"],
        masks.SPLIT,
    ),
    (
        "gpt_oss",  # the call's thinking is there until the answer has been given
        kept(called(thinking="why")),
        ["<|start|>user<|message|>go<|end|><|start|>assistant«<|channel|>analysis<|message|>why<|end|>"
         '<|start|>assistant to=functions.f<|channel|>commentary json<|message|>{"x": 1}<|call|>»',
         "<|start|>user<|message|>go<|end|><|start|>assistant<|channel|>analysis<|message|>why<|end|>"
         '<|start|>assistant to=functions.f<|channel|>commentary json<|message|>{"x": 1}<|call|>'
         '<|start|>functions.f to=assistant<|channel|>commentary<|message|>"7"<|end|>'
         "<|start|>assistant«<|channel|>final<|message|>seven<|return|>»"],
        masks.SPLIT,
    ),
    (
        "numbered",
        TWO,
        ["<|im_start|>user 1/1\nhi<|im_end|>\n<|im_start|>assistant 2/2\n«yes<|im_end|>»",
         "<|im_start|>user 1/3\nhi<|im_end|>\n<|im_start|>assistant 2/3\nyes<|im_end|>\n"
         "<|im_start|>user 3/3\nand<|im_end|>\n<|im_start|>assistant 4/4\n«no<|im_end|>»"],
        masks.SPLIT,
    ),
    (
        "kimi_k2",  # the thinking goes where the template puts an empty block
        THINKING,
        ["<|im_user|>user<|im_middle|>hi<|im_end|><|im_assistant|>assistant<|im_middle|>«<think>why</think>yes<|im_end|>»",
         "<|im_user|>user<|im_middle|>hi<|im_end|><|im_assistant|>assistant<|im_middle|><think></think>yes<|im_end|>"
         "<|im_user|>user<|im_middle|>and<|im_end|><|im_assistant|>assistant<|im_middle|>«<think>so</think>no<|im_end|>»"],
        masks.SPLIT,
    ),
    (
        "kimi_k2",  # and not a second time where it stands in the content
        conversation("hi", "<think>so</think>yes"),
        ["<|im_user|>user<|im_middle|>hi<|im_end|><|im_assistant|>assistant<|im_middle|>«<think>so</think>yes<|im_end|>»"],
        masks.WHOLE,
    ),
    (
        "deepseek_r1",  # thinking in the content, which the template drops but the target said
        conversation("hi", "<think>\nso</think>yes"),
        ["<|begin|><|User|>hi<|Assistant|><think>\n«so</think>yes<|end|>»"],
        masks.INEXACT,
    ),
]  # fmt: skip


@pytest.mark.parametrize(("style", "c", "expected", "note"), CASES, ids=[f"{i}-{c[0]}" for i, c in enumerate(CASES)])
def test_masks_equal_the_hand_made_truth(style: str, c: Conversation, expected: list[str], note: str) -> None:
    tokenizer, samples, notes = samples_of(style, c)
    found = [(tokenizer.decode(s.ids), s.ids, s.mask) for s in samples]
    assert [(tokenizer.decode(i), i, m) for i, m in (truth(tokenizer, e) for e in expected)] == found
    assert notes[note] >= 1
    assert notes[masks.NO_STOP] == 0


def test_a_tool_loop_is_one_sample_with_both_answers_supervised() -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    row = {
        "messages": [
            {"role": "user", "content": "go"},
            {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "a"},
            {"role": "tool", "content": "7"},
            {"role": "assistant", "content": "seven", "reasoning_content": "b"},
        ]
    }
    tokenizer, samples, notes = samples_of("qwen3", answered(read_row(row)))
    ids, mask = truth(
        tokenizer,
        "<|im_start|>user\ngo<|im_end|>\n<|im_start|>assistant\n«<think>\na\n</think>\n\n"
        '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call><|im_end|>»\n'
        "<|im_start|>user\n<tool_response>\n7\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n«<think>\nb\n</think>\n\nseven<|im_end|>»",
    )
    assert [(s.ids, s.mask) for s in samples] == [(ids, mask)]
    assert notes[masks.WHOLE] == 1


def test_smollm2s_own_template(smollm2: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    samples = kept_samples(Renderer(tokenizer, [tokenizer.eos_token_id]), TWO, 500, Counter())
    pieces = [
        ("<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n", False),
        ("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n", False),
        ("yes<|im_end|>", True),
        ("\n<|im_start|>user\nand<|im_end|>\n<|im_start|>assistant\n", False),
        ("no<|im_end|>", True),
    ]
    ids = [tokenizer(text, add_special_tokens=False)["input_ids"] for text, _ in pieces]
    assert [s.ids for s in samples] == [[i for part in ids for i in part]]
    assert samples[0].mask == [on for part, (_, on) in zip(ids, pieces, strict=True) for _ in part]


def test_content_that_looks_like_the_template_moves_no_mask() -> None:
    tokenizer, samples, _ = samples_of("chatml", conversation("assistant\nno", "user\nassistant\n", "x", "assistant\n"))
    ids, mask = truth(
        tokenizer,
        "<|im_start|>user\nassistant\nno<|im_end|>\n<|im_start|>assistant\n«user\nassistant\n<|im_end|>»\n"
        "<|im_start|>user\nx<|im_end|>\n<|im_start|>assistant\n«assistant\n<|im_end|>»",
    )
    assert [(s.ids, s.mask) for s in samples] == [(ids, mask)]


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning", "thinking"])
def test_thinking_under_each_of_its_names(key: str) -> None:
    thinking = {**dict.fromkeys(["reasoning_content", "reasoning", "thinking"]), key: "why"}
    for style in ("qwen3", "gpt_oss"):
        tokenizer, samples, notes = samples_of(style, kept(said("yes", **thinking)))
        assert "why" in tokenizer.decode(samples[0].ids)
        assert notes[masks.UNTHOUGHT] == 0


@pytest.mark.parametrize(
    ("style", "messages", "reason"),
    [
        ("chatml", said("b<|im_end|>c"), "answer contains the stop token"),
        ("chatml", called()[:2], "does not render tool calls"),
        ("gpt_oss", said("b<|call|>"), "answer contains the stop token"),
        ("deepseek_r1", said("b", reasoning="why"), "opens thinking that it does not render"),
    ],
)
def test_what_the_target_cannot_have_said_is_refused(style: str, messages: list[Any], reason: str) -> None:
    with pytest.raises(RowError, match=reason):
        samples_of(style, kept(messages))


def test_a_template_that_hides_the_answers_beginning_is_refused() -> None:
    # the generation prompt is dropped, the history changes, and the call stands where no text is its own
    template = (
        "{{ messages | length }}{% for m in messages %}<|{{ m.role }}|>{{ m.content }}"
        "{{ 'call' if m.tool_calls else '' }}<e>{% endfor %}{{ '<|model|>' if add_generation_prompt else '' }}"
    )
    tokenizer = byte_tokenizer(template, ["<e>"], eos="<e>")
    with pytest.raises(RowError, match="does not show where the answer begins"):
        kept_samples(Renderer(tokenizer, []), kept(called()[:2]), 500, Counter())


def test_what_the_template_leaves_out_is_counted() -> None:
    """SmolLM2's way: thinking, tool calls and tools are not in the template, and a call is no answer of nothing."""
    messages = [*said("yes", reasoning="why"), *called()]
    row = read_row({"messages": messages, "tools": [{"type": "function", "function": {"name": "f"}}]})
    tokenizer, samples, notes = samples_of("chatml", row)
    ids, mask = truth(
        tokenizer,
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n«yes<|im_end|>»\n<|im_start|>user\ngo<|im_end|>\n"
        "<|im_start|>assistant\n<|im_end|>\n<|im_start|>tool\n7<|im_end|>\n<|im_start|>assistant\n«seven<|im_end|>»",
    )
    assert [(s.ids, s.mask) for s in samples] == [(ids, mask)]
    assert notes[masks.UNTHOUGHT] == notes[masks.TOOLS_IGNORED] == 1
    assert notes[masks.LEFT_OUT + "the chat template does not render tool calls"] == 1
    counted: Counter[str] = Counter()
    Renderer(tokenizer, []).first_prompts([row, TWO], counted)
    assert counted == {masks.TOOLS_IGNORED: 1}


def test_the_prompts_own_tokens_stay_where_the_tokenizer_would_merge_them(smollm2: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    notes: Counter[str] = Counter()
    render = Renderer(tokenizer, [tokenizer.eos_token_id])
    [sample] = kept_samples(render, conversation("hi", "\n\nyes"), 500, notes)
    prompt = render.prompt([{"role": "user", "content": "hi"}], None)
    answer = tokenizer("\n\nyes<|im_end|>", add_special_tokens=False)["input_ids"]
    assert render.whole(said("\n\nyes"), None)[: len(prompt)] != prompt
    assert (sample.ids, sample.mask) == ([*prompt, *answer], [False] * len(prompt) + [True] * len(answer))
    assert notes[masks.MERGED] == 1
    assert notes[masks.SPLIT] == notes[masks.INEXACT] == 0
    kept_samples(render, conversation("hi", "\n\nyes", "and", "\n\nno"), 500, notes)
    assert notes[masks.SPLIT_MERGED] == 1


def test_too_long_is_cut_at_a_turn_or_refused() -> None:
    tokenizer, whole, _ = samples_of("chatml", TWO)
    first = len(truth(tokenizer, CASES[0][2][0])[0]) // 2
    _, samples, notes = samples_of("chatml", TWO, max_length=len(whole[0].ids) - 1)
    assert tokenizer.decode(samples[0].ids).endswith("yes<|im_end|>")
    assert notes[masks.CUT] == 1
    with pytest.raises(RowError, match=r"longer than data\.max_length"):
        samples_of("chatml", TWO, max_length=first - 8)
    _, both, _ = samples_of("qwen3", THINKING)
    _, samples, notes = samples_of("qwen3", THINKING, max_length=len(both[1].ids) - 1)
    assert [s.turn for s in samples] == [0]
    assert notes[masks.LONG_TURN] == 1


class SlowBytes(PreTrainedTokenizer):
    """A tokenizer in Python, without offsets, as tiktoken-based checkpoints bring along."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(eos_token="<|im_end|>", additional_special_tokens=["<|im_start|>"], **kwargs)

    @property
    def vocab_size(self) -> int:
        return 256

    def get_vocab(self) -> dict[str, int]:
        return {chr(i): i for i in range(256)} | self.added_tokens_encoder

    def _tokenize(self, text: str, **kwargs: Any) -> list[str]:
        return [chr(b) for b in text.encode()]

    def _convert_token_to_id(self, token: str) -> int:
        return ord(token)

    def _convert_id_to_token(self, index: int) -> str:
        return chr(index)


def test_a_slow_tokenizer_without_offsets() -> None:
    tokenizer = SlowBytes()
    assert not tokenizer.is_fast
    tokenizer.chat_template = STYLES["chatml"].template
    samples = kept_samples(Renderer(tokenizer, []), TWO, 500, Counter())
    assert [(s.ids, s.mask) for s in samples] == [truth(tokenizer, CASES[0][2][0])]


def test_generation_keyword_is_not_needed_and_empty_masks_are_refused() -> None:
    for style in STYLES.values():
        assert "generation %}" not in style.template
    for name in STYLES:
        _, samples, _ = samples_of(name, TWO)
        for s in samples:
            assert any(s.mask), "a mask of zeros"
            assert not all(s.mask), "a mask of ones"


def test_a_template_that_renders_nothing_useful_is_refused() -> None:
    with pytest.raises(InputError, match="cannot render one user message: no system"):
        Renderer(byte_tokenizer("{{ raise_exception('no system') }}", ["<e>"], eos="<e>"), [])
    with pytest.raises(InputError, match="renders nothing"):
        Renderer(byte_tokenizer("{# nothing #}", ["<e>"], eos="<e>"), [])
