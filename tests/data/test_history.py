"""A later turn's prompt: the target's answer as a message, its thinking where the template takes it."""

import pytest

from eyas.data.history import answer_message, next_prompt
from eyas.data.render import Renderer

from .templates import STYLES


def render(name: str) -> Renderer:
    tokenizer = STYLES[name].tokenizer()
    return Renderer(tokenizer, [tokenizer.convert_tokens_to_ids(s) for s in STYLES[name].stops])


@pytest.mark.parametrize(
    ("style", "answer", "content", "reasoning"),
    [
        # what vLLM 0.32's parsers return (deepseek_r1, qwen3, kimi_k2): the line ends after the mark stay
        ("qwen3", "<think>\nwhy\n</think>\n\nyes<|im_end|>", "\n\nyes", "\nwhy"),
        ("qwen3", "<think>\nwhy<|im_end|>", "", "\nwhy"),
        ("qwen3", "<think>\n\n</think>\n\nyes<|im_end|>", "\n\nyes", None),
        ("qwen3", "yes<|im_end|>", "yes", None),
        ("qwen3", "a <think> is a tag<|im_end|>", "a <think> is a tag", None),
        ("kimi", "<think>why </think>yes<|im_end|>", "yes", "why"),
        ("deepseek_r1", "why\n</think>\n\nyes<|end|>", "\n\nyes", "why"),
        ("deepseek_r1", "why</think>a</think>b<|end|>", "a</think>b", "why"),
        ("deepseek_r1", "why<|end|>", "", "why"),  # the prompt opened the thinking
        ("deepseek_v31", "yes<|end|>", "yes", None),  # the prompt closed it
        ("chatml", "<think>a</think>b<|im_end|>", "<think>a</think>b", None),
        ("gpt_oss", "<|channel|>analysis<|message|>why<|end|>"
         "<|start|>assistant<|channel|>final<|message|>yes<|return|>", "yes", "why"),
        ("gpt_oss", "<|channel|>final<|message|>yes<|return|>", "yes", None),
    ],
)  # fmt: skip
def test_answers_as_a_server_returns_them(style: str, answer: str, content: str, reasoning: str | None) -> None:
    r = render(style)
    message = answer_message(r, r.tokenizer(answer, add_special_tokens=False)["input_ids"])
    assert message["content"] == content
    assert message.get("reasoning_content") == reasoning


def test_the_template_strips_thinking_from_the_history() -> None:
    r = render("qwen3")
    users = [{"role": "system", "content": "s"}, {"role": "user", "content": "a"}, {"role": "user", "content": "b"}]
    answer = r.tokenizer("<think>\nwhy\n</think>\n\nyes<|im_end|>", add_special_tokens=False)["input_ids"]
    assert r.tokenizer.decode(next_prompt(r, users, None, [answer])) == (
        "<|im_start|>system\ns<|im_end|>\n<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n\n\nyes<|im_end|>\n"
        "<|im_start|>user\nb<|im_end|>\n<|im_start|>assistant\n"
    )
