"""Small tokenizers for tests: a byte-level BPE that is trained in a moment, with the chat template of a public family.

The templates are written from the families' documentation. What each has that can break a prefix:
chatml (as Qwen3 uses it): tools in the system turn, reasoning stripped from turns before the last question,
`enable_thinking`; llama3: today's date in the system turn (`date_string`), tools in the first question; gemma: the
system prompt in the first question, roles alternate; harmony (gpt-oss): `reasoning_effort` in the first line.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

from kvtune.requests.log.render_loop import LOAD
from kvtune.requests.log.rendering import Rendering

PROSE = (
    "You are a helpful assistant. Answer in short sentences, and call a tool where one helps. "
    "The user asks a question about the weather in Paris; the assistant thinks about it and answers. "
    "Current date and time: Thursday 26 November 2026, 12:00:00. Request id 550e8400-e29b-41d4-a716-446655440000. "
    '{"type": "function", "function": {"name": "get_weather", "description": "The weather of a city", "parameters": '
    '{"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}} '
    "Reasoning: low medium high. Cutting Knowledge Date. Today Date. Naïve café, 東京 and 🚀 take several tokens each. "
)
WORDS = 600

CHATML = """\
{%- macro text(content) -%}{{ content if content is string else '' }}{%- endmacro -%}
{%- if tools %}
{{- '<|im_start|>system\\n' }}
{%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{% endif %}
{{- '# Tools\\n\\nYou may call one or more functions to assist with the user query.\\n\\n<tools>' }}
{%- for tool in tools %}{{- '\\n' + (tool | tojson) }}{% endfor %}
{{- '\\n</tools><|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
{{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set last = namespace(question=-1) %}
{%- for message in messages %}
{%- if message.role == 'user' %}{% set last.question = loop.index0 %}{% endif %}
{%- endfor %}
{%- for message in messages %}
{%- if message.role == 'assistant' %}
{%- set content = text(message.content) %}
{%- set reasoning = message.reasoning_content if message.reasoning_content is string else '' %}
{%- if not reasoning and '</think>' in content %}
{%- set reasoning = content.split('</think>')[0].split('<think>')[-1].strip('\\n') %}
{%- set content = content.split('</think>')[-1].lstrip('\\n') %}
{%- endif %}
{{- '<|im_start|>assistant\\n' }}
{%- if reasoning and loop.index0 > last.question %}{{- '<think>\\n' + reasoning + '\\n</think>\\n\\n' }}{% endif %}
{{- content }}
{%- for call in message.tool_calls or [] %}
{{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- call.function.arguments if call.function.arguments is string else call.function.arguments | tojson }}
{{- '}\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- elif message.role == 'tool' %}
{{- '<|im_start|>user\\n<tool_response>\\n' + text(message.content) + '\\n</tool_response><|im_end|>\\n' }}
{%- elif message.role == 'user' or not loop.first %}
{{- '<|im_start|>' + message.role + '\\n' + text(message.content) + '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{% endif %}
{%- endif %}
"""

LLAMA3 = """\
{{- bos_token }}
{%- if date_string is not defined %}{% set date_string = '26 Jul 2024' %}{% endif %}
{%- set system = '' %}
{%- if messages[0]['role'] == 'system' %}
{%- set system = messages[0]['content'] | trim %}{% set messages = messages[1:] %}
{%- endif %}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\n' }}
{%- if tools %}{{- 'Environment: ipython\\n' }}{% endif %}
{{- 'Cutting Knowledge Date: December 2023\\nToday Date: ' + date_string + '\\n\\n' + system + '<|eot_id|>' }}
{%- for message in messages %}
{{- '<|start_header_id|>' + ('ipython' if message.role == 'tool' else message.role) + '<|end_header_id|>\\n\\n' }}
{%- if tools and loop.first %}
{{- 'Given the following functions, please respond with a JSON for a function call.\\n\\n' }}
{%- for tool in tools %}{{- (tool | tojson(indent=4)) + '\\n\\n' }}{% endfor %}
{%- endif %}
{%- if message.tool_calls %}
{%- set call = message.tool_calls[0].function %}
{{- '{"name": "' + call.name + '", "parameters": ' + (call.arguments | tojson) + '}' }}
{%- else %}
{{- message.content | trim }}
{%- endif %}
{{- '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}
"""

GEMMA = """\
{{- bos_token }}
{%- set first = '' %}
{%- if messages[0]['role'] == 'system' %}
{%- set first = (messages[0]['content'] if messages[0]['content'] is string else messages[0]['content'][0]['text']) %}
{%- set first = first + '\\n\\n' %}{% set messages = messages[1:] %}
{%- endif %}
{%- for message in messages %}
{%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
{%- endif %}
{{- '<start_of_turn>' + ('model' if message['role'] == 'assistant' else message['role']) + '\\n' }}
{{- first if loop.first else '' }}
{%- if message['content'] is string %}
{{- message['content'] | trim }}
{%- else %}
{%- for item in message['content'] %}{% if item['type'] == 'text' %}{{- item['text'] | trim }}{% endif %}{% endfor %}
{%- endif %}
{{- '<end_of_turn>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<start_of_turn>model\\n' }}{% endif %}
"""

HARMONY = """\
{{- '<|start|>system<|message|>You are ChatGPT.\\nKnowledge cutoff: 2024-06\\n\\nReasoning: ' }}
{{- (reasoning_effort or 'medium') + '\\n\\n# Valid channels: analysis, commentary, final.<|end|>' }}
{%- if messages[0].role in ('system', 'developer') or tools %}
{{- '<|start|>developer<|message|>' }}
{%- if messages[0].role in ('system', 'developer') %}
{{- '# Instructions\\n\\n' + messages[0].content }}{% set messages = messages[1:] %}
{%- endif %}
{%- if tools %}
{{- '\\n\\n# Tools\\n\\nnamespace functions {' }}
{%- for tool in tools %}{{- '\\n' + (tool.function | tojson) }}{% endfor %}
{{- '\\n}' }}
{%- endif %}
{{- '<|end|>' }}
{%- endif %}
{%- for message in messages %}
{%- if message.role == 'assistant' %}
{%- if message.thinking and loop.last %}
{{- '<|start|>assistant<|channel|>analysis<|message|>' + message.thinking + '<|end|>' }}
{%- endif %}
{{- '<|start|>assistant<|channel|>final<|message|>' + message.content + '<|end|>' }}
{%- else %}
{{- '<|start|>' + message.role + '<|message|>' + message.content + '<|end|>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{% endif %}
"""

TEMPLATES = {"chatml": CHATML, "llama3": LLAMA3, "gemma": GEMMA, "harmony": HARMONY}
SPECIAL: dict[str, tuple[str, ...]] = {
    "": ("<|endoftext|>",),
    "chatml": ("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
    "llama3": ("<|eot_id|>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>"),
    "gemma": ("<eos>", "<bos>", "<start_of_turn>", "<end_of_turn>"),
    "harmony": ("<|return|>", "<|start|>", "<|end|>", "<|message|>", "<|channel|>"),
}
"""A family's special tokens, the one that ends an answer first."""
BEGINS = {"llama3": "<|begin_of_text|>", "gemma": "<bos>"}
"""What a family's tokenizer puts in front of each text."""


def make_tokenizer(folder: Path, template: str = "chatml", *, text: str = "") -> Path:
    """A folder that transformers and vLLM load a tokenizer from: `template` names a family, "" has no chat template.

    `text`: a chat template in place of the family's.

    It has some 500 tokens. Needs the package `tokenizers`, which comes with vLLM.
    """
    from tokenizers import AddedToken, Tokenizer
    from tokenizers.processors import ByteLevel, Sequence, TemplateProcessing

    tokenizer = Tokenizer.from_str(_trained())
    tokenizer.add_special_tokens([AddedToken(each, normalized=False) for each in SPECIAL[template]])
    bos = BEGINS.get(template)
    if bos is not None:
        begins = TemplateProcessing(single=f"{bos} $A", special_tokens=[(bos, tokenizer.token_to_id(bos))])
        tokenizer.post_processor = Sequence([ByteLevel(trim_offsets=False), begins])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": 1 << 20,
        "clean_up_tokenization_spaces": False,
        "eos_token": SPECIAL[template][0],
        **({"bos_token": bos} if bos is not None else {}),
        **({"chat_template": text or TEMPLATES[template]} if template else {}),
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


class OneChild:
    """A process for all tokenizers of the tests of a file: each test's is loaded into it, in place of the last."""

    def __init__(self) -> None:
        self._by: Rendering | None = None

    def load(self, folder: Path) -> Rendering:
        if self._by is None or not self._by._close.alive:
            self._by = Rendering(str(folder))
        else:
            self._by.name = str(folder)
            self._by.how = self._by._asked(LOAD, str(folder).encode()).decode()
        return self._by


@cache
def _trained() -> str:
    from tokenizers import ByteLevelBPETokenizer

    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator([PROSE], vocab_size=WORDS, min_frequency=1, show_progress=False)
    return str(bpe.to_str())
