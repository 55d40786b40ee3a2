"""Chat templates written for these tests, each in the style of one family: ends of turns, thinking in history."""

from dataclasses import dataclass

from transformers import PreTrainedTokenizerFast

from .tiny import CHATML, byte_tokenizer

LLAMA3 = (
    "<|begin_of_text|>{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
    "{{ m.content | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)

_LAST_USER = (
    "{% set ns = namespace(last=-1) %}{% for m in messages %}"
    "{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
)

# thinking stays only after the last user turn; there an empty block is put in where there is none
QWEN3 = _LAST_USER + (
    "{% for m in messages %}{% if m.role == 'assistant' %}<|im_start|>assistant\n"
    "{% if loop.index0 > ns.last %}<think>\n{{ m.reasoning_content or '' }}\n</think>\n\n{% endif %}"
    "{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>\n{{ c.function | tojson }}\n</tool_call>{% endfor %}"
    "<|im_end|>\n{% elif m.role == 'tool' %}<|im_start|>user\n<tool_response>\n{{ m.content }}\n</tool_response>"
    "<|im_end|>\n{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

# the generation prompt opens a think block that no rendered answer has; thinking is never rendered
DEEPSEEK_R1 = (
    "<|begin|>{% for m in messages %}{% if m.role == 'user' %}<|User|>{{ m.content }}"
    "{% else %}<|Assistant|>{{ m.content.split('</think>') | last }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|Assistant|><think>\n{% endif %}"
)

# without thinking the generation prompt closes a block, and so does every answer in the history
DEEPSEEK_V31 = (
    "<|begin|>{% for m in messages %}{% if m.role == 'user' %}<|User|>{{ m.content }}"
    "{% else %}<|Assistant|></think>{{ m.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|Assistant|></think>{% endif %}"
)

# an empty think block replaces thinking in earlier turns
KIMI = _LAST_USER + (
    "{% for m in messages %}{% if m.role == 'assistant' %}<|im_assistant|>assistant<|im_middle|>"
    "{% if loop.index0 > ns.last %}<think>{{ m.reasoning_content or '' }}</think>{% else %}<think></think>{% endif %}"
    "{{ m.content }}<|im_end|>{% else %}<|im_{{ m.role }}|>{{ m.role }}<|im_middle|>{{ m.content }}<|im_end|>"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_assistant|>assistant<|im_middle|>{% endif %}"
)

# thinking is never rendered: every answer begins with an empty block
KIMI_K2 = (
    "{% for m in messages %}<|im_{{ m.role }}|>{{ m.role }}<|im_middle|>"
    "{{ '<think></think>' if m.role == 'assistant' else '' }}{{ m.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_assistant|>assistant<|im_middle|>{% endif %}"
)

# a turn ends with the header of the next one: the stop token is <|user|>
GLM = _LAST_USER + (
    "[gMASK]{% for m in messages %}{% if m.role == 'assistant' %}<|assistant|>\n"
    "{% if loop.index0 > ns.last and m.reasoning_content %}<think>{{ m.reasoning_content }}</think>\n"
    "{% else %}<think></think>\n{% endif %}{{ m.content }}"
    "{% else %}<|{{ m.role }}|>\n{{ m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)

# a turn ends with the next header: <|user|> after an answer, <|observation|> after a tool call
GLM_TOOLS = (
    "[gMASK]{% for m in messages %}{% if m.role == 'assistant' %}<|assistant|>\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.name }}</tool_call>{% endfor %}"
    "{% elif m.role == 'tool' %}<|observation|>\n{{ m.content }}{% else %}<|{{ m.role }}|>\n{{ m.content }}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)

# without a generation prompt there is a token for the end of all text
PHI3 = (
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% else %}<|endoftext|>{% endif %}"
)

# the last answer ends in <|return|>, earlier ones in <|end|>; a call's thinking goes once an answer follows
GPT_OSS = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{% if 'tool_calls' in m %}"
    "{% set ns = namespace(final=false) %}{% for f in messages[loop.index:] %}"
    "{% if f.role == 'assistant' and 'tool_calls' not in f %}{% set ns.final = true %}{% endif %}{% endfor %}"
    "{% if m.thinking and not ns.final %}<|start|>assistant<|channel|>analysis<|message|>{{ m.thinking }}<|end|>"
    "{% endif %}<|start|>assistant to=functions.{{ m.tool_calls[0].function.name }}<|channel|>commentary json"
    "<|message|>{{ m.tool_calls[0].function.arguments | tojson }}<|call|>"
    "{% elif loop.last and not add_generation_prompt %}"
    "{% if 'thinking' in m %}<|start|>assistant<|channel|>analysis<|message|>{{ m.thinking }}<|end|>{% endif %}"
    "<|start|>assistant<|channel|>final<|message|>{{ m.content }}<|return|>{% else %}"
    "<|start|>assistant<|channel|>final<|message|>{{ m.content }}<|end|>{% endif %}{% elif m.role == 'tool' %}"
    "<|start|>functions.f to=assistant<|channel|>commentary<|message|>{{ m.content | tojson }}<|end|>{% else %}"
    "<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)

# every header changes with the number of messages
NUMBERED = (
    "{% for m in messages %}<|im_start|>{{ m.role }} {{ loop.index }}/{{ messages | length }}\n"
    "{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}"
    "<|im_start|>assistant {{ messages | length + 1 }}/{{ messages | length + 1 }}\n{% endif %}"
)


@dataclass(frozen=True)
class Style:
    template: str
    special: list[str]
    eos: str
    stops: list[str]

    def tokenizer(self) -> PreTrainedTokenizerFast:
        return byte_tokenizer(self.template, self.special, eos=self.eos, plain=["<think>", "</think>"])


_CHATML = ["<|im_start|>", "<|im_end|>", "<|endoftext|>"]
_DEEPSEEK = ["<|begin|>", "<|end|>", "<|User|>", "<|Assistant|>"]
_KIMI = ["<|im_user|>", "<|im_system|>", "<|im_assistant|>", "<|im_middle|>", "<|im_end|>", "[EOS]"]
STYLES = {
    "chatml": Style(CHATML, _CHATML, "<|im_end|>", ["<|im_end|>"]),
    "llama3": Style(
        LLAMA3,
        ["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"],
        "<|end_of_text|>",
        ["<|end_of_text|>", "<|eot_id|>"],
    ),
    "qwen3": Style(QWEN3, _CHATML, "<|im_end|>", ["<|im_end|>", "<|endoftext|>"]),
    "deepseek_r1": Style(DEEPSEEK_R1, _DEEPSEEK, "<|end|>", ["<|end|>"]),
    "deepseek_v31": Style(DEEPSEEK_V31, _DEEPSEEK, "<|end|>", ["<|end|>"]),
    "kimi": Style(KIMI, _KIMI, "[EOS]", ["<|im_end|>"]),
    "kimi_k2": Style(KIMI_K2, _KIMI, "[EOS]", ["<|im_end|>"]),
    "glm": Style(
        GLM,
        ["[gMASK]", "<|system|>", "<|user|>", "<|assistant|>", "<|endoftext|>"],
        "<|endoftext|>",
        ["<|endoftext|>", "<|user|>"],
    ),
    "glm_tools": Style(
        GLM_TOOLS,
        ["[gMASK]", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>", "<|endoftext|>"],
        "<|endoftext|>",
        ["<|endoftext|>", "<|user|>", "<|observation|>"],
    ),
    "phi3": Style(
        PHI3,
        ["<|system|>", "<|user|>", "<|assistant|>", "<|end|>", "<|endoftext|>"],
        "<|endoftext|>",
        ["<|endoftext|>", "<|assistant|>", "<|end|>"],
    ),
    "gpt_oss": Style(
        GPT_OSS,
        ["<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>"],
        "<|return|>",
        ["<|return|>", "<|call|>"],
    ),
    "numbered": Style(NUMBERED, _CHATML, "<|im_end|>", ["<|im_end|>"]),
}
