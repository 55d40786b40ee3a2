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
        ("qwen3", "<think>\nwhy\n</think>\n\nyes<|im_end|>", "yes", "why"),
        ("qwen3", "yes<|im_end|>", "yes", None),
        ("kimi", "<think>why</think>yes<|im_end|>", "yes", "why"),
        ("deepseek_r1", "why\n</think>\n\nyes<|end|>", "yes", "why"),
        ("chatml", "<think>a</think>b<|im_end|>", "<think>a</think>b", None),
    ],
)
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
        "<|im_start|>system\ns<|im_end|>\n<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nyes<|im_end|>\n"
        "<|im_start|>user\nb<|im_end|>\n<|im_start|>assistant\n"
    )
