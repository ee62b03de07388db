"""Chat templates with tools, in the style of the large families, and a tokenizer that knows their control tokens."""

from __future__ import annotations

from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from tests.rag.tokenizers_for_tests import byte_level

# Calls and results as Qwen2.5 and Hermes write them: results in a row share a turn of the user.
QWEN = (
    "{%- if tools %}{{ '<|im_start|>system\n' }}"
    "{{ messages[0].content if messages[0].role == 'system' else 'You are helpful.' }}"
    "{{ '\n\n# Tools\n\nSignatures within <tools></tools>:\n<tools>' }}"
    "{%- for tool in tools %}{{ '\n' + (tool | tojson) }}{%- endfor %}"
    "{{ '\n</tools>\n\nAnswer within <tool_call></tool_call>:\n<tool_call>\n"
    '{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call><|im_end|>\n\' }}'
    "{%- elif messages[0].role == 'system' %}{{ '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}"
    "{%- else %}{{ '<|im_start|>system\nYou are helpful.<|im_end|>\n' }}{%- endif %}"
    "{%- for message in messages %}"
    "{%- if message.role == 'user' or (message.role == 'system' and not loop.first)"
    " or (message.role == 'assistant' and not message.tool_calls) %}"
    "{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}"
    "{%- elif message.role == 'assistant' %}{{ '<|im_start|>assistant' }}"
    "{%- if message.content %}{{ '\n' + message.content }}{%- endif %}"
    "{%- for call in message.tool_calls %}{%- set call = call.function %}"
    '{{ \'\n<tool_call>\n{"name": "\' + call.name + \'", "arguments": \' + (call.arguments | tojson)'
    " + '}\n</tool_call>' }}{%- endfor %}{{ '<|im_end|>\n' }}"
    "{%- elif message.role == 'tool' %}"
    "{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{%- endif %}"
    "{{ '\n<tool_response>\n' + message.content + '\n</tool_response>' }}"
    "{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\n' }}{%- endif %}"
    "{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{%- endif %}"
)

# As Llama 3.1: tools stand in the first user turn, one call a turn, results become JSON strings.
LLAMA31 = (
    "{{ bos_token }}{%- if messages[0].role == 'system' %}"
    "{%- set system = messages[0].content | trim %}{%- set messages = messages[1:] %}"
    "{%- else %}{%- set system = '' %}{%- endif %}"
    "{{ '<|start_header_id|>system<|end_header_id|>\n\n' }}"
    "{%- if tools is not none and tools is defined %}{{ 'Environment: ipython\n' }}{%- endif %}"
    "{{ 'Today Date: 26 Jul 2024\n\n' + system + '<|eot_id|>' }}"
    "{%- if tools is not none and tools is defined %}"
    "{%- set first = messages[0].content | trim %}{%- set messages = messages[1:] %}"
    "{{ '<|start_header_id|>user<|end_header_id|>\n\nGiven the following functions, respond with JSON.\n\n' }}"
    "{%- for tool in tools %}{{ (tool | tojson(indent=4)) + '\n\n' }}{%- endfor %}"
    "{{ first + '<|eot_id|>' }}{%- endif %}"
    "{%- for message in messages %}"
    "{%- if not (message.role == 'tool' or 'tool_calls' in message) %}"
    "{{ '<|start_header_id|>' + message.role + '<|end_header_id|>\n\n' + message.content | trim + '<|eot_id|>' }}"
    "{%- elif 'tool_calls' in message %}"
    "{%- if message.tool_calls | length != 1 %}{{ raise_exception('only single tool-calls at once!') }}{%- endif %}"
    "{%- set call = message.tool_calls[0].function %}"
    '{{ \'<|start_header_id|>assistant<|end_header_id|>\n\n{"name": "\' + call.name + \'", "parameters": \''
    " + (call.arguments | tojson) + '}<|eot_id|>' }}"
    "{%- else %}{{ '<|start_header_id|>ipython<|end_header_id|>\n\n' }}"
    "{%- if message.content is mapping or message.content is iterable %}{{ message.content | tojson }}"
    "{%- else %}{{ message.content }}{%- endif %}{{ '<|eot_id|>' }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif %}"
)

# As Mistral v3: tools and the system prompt stand at the last user turn, the latter only if that turn is the last;
# ids have nine characters.
MISTRAL3 = (
    "{%- if messages[0].role == 'system' %}{%- set system = messages[0].content %}{%- set turns = messages[1:] %}"
    "{%- else %}{%- set turns = messages %}{%- endif %}"
    "{%- set asked = turns | selectattr('role', 'equalto', 'user') | list %}"
    "{%- set ns = namespace(index=0) %}{%- for message in turns %}"
    "{%- if not (message.role == 'tool' or message.tool_calls is defined) %}"
    "{%- if (message.role == 'user') != (ns.index % 2 == 0) %}"
    "{{ raise_exception('roles must alternate user/assistant') }}{%- endif %}"
    "{%- set ns.index = ns.index + 1 %}{%- endif %}{%- endfor %}"
    "{{ bos_token }}{%- for message in turns %}"
    "{%- if message.role == 'user' %}"
    "{%- if tools is not none and tools is defined and message == asked[-1] %}{{ '[AVAILABLE_TOOLS] [' }}"
    "{%- for tool in tools %}{%- set tool = tool.function %}"
    '{{ \'{"type": "function", "function": {\' }}'
    "{%- for key, value in tool.items() if key != 'return' %}"
    "{%- if value is string %}{{ '\"' + key + '\": \"' + value + '\"' }}"
    "{%- else %}{{ '\"' + key + '\": ' + (value | tojson) }}{%- endif %}"
    "{%- if not loop.last %}{{ ', ' }}{%- endif %}{%- endfor %}{{ '}}' }}"
    "{{ ', ' if not loop.last else ']' }}{%- endfor %}{{ '[/AVAILABLE_TOOLS]' }}{%- endif %}"
    "{{ '[INST] ' + (system + '\n\n' if loop.last and system is defined else '') + message.content + '[/INST]' }}"
    "{%- elif message.tool_calls is defined %}{{ '[TOOL_CALLS] [' }}"
    "{%- for call in message.tool_calls %}{{ (call.function | tojson)[:-1] }}"
    "{%- if call.id is not defined or call.id | length != 9 %}{{ raise_exception('IDs must have length 9!') }}"
    "{%- endif %}{{ ', \"id\": \"' + call.id + '\"}' + (', ' if not loop.last else ']' + eos_token) }}{%- endfor %}"
    "{%- elif message.role == 'assistant' %}{{ ' ' + message.content | trim + eos_token }}"
    "{%- else %}{{ '[TOOL_RESULTS] {\"content\": ' + message.content | string + ', ' }}"
    "{%- if message.tool_call_id | length != 9 %}{{ raise_exception('IDs must have length 9!') }}{%- endif %}"
    "{{ '\"call_id\": \"' + message.tool_call_id + '\"}[/TOOL_RESULTS]' }}{%- endif %}{%- endfor %}"
)

# As newer Mistral templates: the name stands before the arguments, which must be a string, and long ids are fine.
TEKKEN = (
    "{{ bos_token }}{%- if tools %}{{ '[AVAILABLE_TOOLS]' + (tools | tojson) + '[/AVAILABLE_TOOLS]' }}{%- endif %}"
    "{%- for message in messages %}"
    "{%- if message.role == 'system' %}{{ '[SYSTEM_PROMPT]' + message.content + '[/SYSTEM_PROMPT]' }}"
    "{%- elif message.role == 'user' %}{{ '[INST]' + message.content + '[/INST]' }}"
    "{%- elif message.role == 'tool' %}{{ '[TOOL_RESULTS]' + message.content + '[/TOOL_RESULTS]' }}"
    "{%- else %}{{ message.content }}{%- for call in message.tool_calls or [] %}"
    "{{ '[TOOL_CALLS]' + call.function.name + '[ARGS]' + call.function.arguments }}{%- endfor %}{{ eos_token }}"
    "{%- endif %}{%- endfor %}"
)

# Writes calls in a way that nobody here can read.
UNREADABLE = QWEN.replace("(call.arguments | tojson)", "(call.arguments.items() | list | string)")

CONTROL = (
    "<|python_tag|>",
    "[INST]",
    "[/INST]",
    "[AVAILABLE_TOOLS]",
    "[/AVAILABLE_TOOLS]",
    "[TOOL_RESULTS]",
    "[/TOOL_RESULTS]",
    "[SYSTEM_PROMPT]",
    "[/SYSTEM_PROMPT]",
    "[ARGS]",
    "ENDOFTURN",
)


def with_tools(template: str) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer to which all marks of these templates are special tokens."""
    tokenizer = byte_level(template, bos="<bos>", eos="<|endoftext|>")
    tokenizer.backend_tokenizer.add_special_tokens([AddedToken(mark, special=True) for mark in CONTROL])
    # Known to the shared tokenizer as ordinary added tokens.
    marks = ("[TOOL_CALLS]", "<tool_call>", "</tool_call>")
    tokenizer.backend_tokenizer.add_special_tokens([AddedToken(mark, special=True, normalized=False) for mark in marks])
    return tokenizer


WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Tells the weather; answers like “mild”.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "description": "Where?"},
                "unit": {"type": "string", "enum": ["°C", "F"], "default": "F"},
            },
            "required": ["city"],
        },
    },
}
SEARCH = {
    "type": "function",
    "function": {
        "name": "search",
        "description": "Finds texts.",
        "parameters": {"type": "object", "properties": {"query": {"type": "string"}, "top": {"type": "integer"}}},
    },
}
TOOLS = [WEATHER, SEARCH]
