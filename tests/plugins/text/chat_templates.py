"""Chat templates by the rules of twenty families of models, with their answers marked, and unusual chats."""

from __future__ import annotations

import re
from typing import Any

_ALTERNATE = (
    "{% if (message.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant') }}{% endif %}"
)
_CALLS = (
    "{% for call in message.tool_calls or [] %}{{ '\\n<tool_call>\\n' + (call.function | tojson) + '\\n</tool_call>' }}"
    "{% endfor %}"
)
_ASK_CHATML = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"


def _turns(user: str, answer: str, ask: str, before: str = "", other: str = "", after: str = "") -> str:
    """Return a template of one expression for each role, and one for the words that ask for an answer."""
    other = other or user
    return (
        f"{before}{{% for message in messages %}}{{% if message.role == 'assistant' %}}{answer}"
        f"{{% elif message.role == 'user' %}}{user}{{% else %}}{other}{{% endif %}}{{% endfor %}}{after}"
        f"{{% if add_generation_prompt %}}{ask}{{% endif %}}"
    )


def _said(head: str, end: str, content: str = "message.content") -> str:
    """Return an answer behind its head, marked with its end."""
    return f"{head}{{% generation %}}{{{{ {content} }}}}{end}{{% endgeneration %}}"


_THOUGHT = (  # what is thought, and what is said
    "{% set text = message.content or '' %}{% set thought = '' %}{% if '</think>' in text %}"
    "{% set thought = text.split('</think>')[0].split('<think>')[-1].strip('\\n') %}"
    "{% set text = text.split('</think>')[-1].lstrip('\\n') %}{% endif %}"
)
_LAST_QUESTION = (
    "{% set ns = namespace(last=-1) %}{% for message in messages %}{% if message.role == 'user' %}"
    "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
)
_SYSTEM_FIRST = (
    "{% if messages[0].role == 'system' %}{% set first = messages[0].content %}{% set rest = messages[1:] %}"
    "{% else %}{% set first = '' %}{% set rest = messages %}{% endif %}"
)

MARKED = {
    "chatml": _turns(
        "{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}",
        _said("{{ '<|im_start|>assistant\\n' }}", "{{ '<|im_end|>\\n' }}"),
        "{{ '<|im_start|>assistant\\n' }}",
    ),
    "qwen 2.5": _turns(
        "{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}",
        "{{ '<|im_start|>assistant\\n' }}{% generation %}{{ message.content }}" + _CALLS + "{{ '<|im_end|>\\n' }}"
        "{% endgeneration %}",
        "{{ '<|im_start|>assistant\\n' }}",
        "{% if messages[0].role != 'system' %}{{ '<|im_start|>system\\nYou are Qwen.<|im_end|>\\n' }}{% endif %}",
        "{{ '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' "
        "if message.role == 'tool' else '<|im_start|>system\\n' + message.content + '<|im_end|>\\n' }}",
    ),
    "qwen 3": _LAST_QUESTION
    + _turns(
        "{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}",
        _THOUGHT + "{{ '<|im_start|>assistant\\n' }}{% generation %}"
        "{% if loop.index0 > ns.last and (loop.last or thought) %}{{ '<think>\\n' + thought + '\\n</think>\\n\\n' }}"
        "{% endif %}{{ text }}" + _CALLS + "{{ '<|im_end|>\\n' }}{% endgeneration %}",
        "{{ '<|im_start|>assistant\\n' }}{% if enable_thinking is defined and not enable_thinking %}"
        "{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}",
    ),
    "qwen, thinking": "{% if not (messages | selectattr('role', 'equalto', 'user') | list) %}"
    "{{ raise_exception('No user query found in messages.') }}{% endif %}"
    + _turns(
        "{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}",
        _THOUGHT + "{{ '<|im_start|>assistant\\n' }}{% generation %}{{ '<think>\\n' + thought + '\\n</think>\\n\\n' "
        "if thought else '' }}{{ text }}" + _CALLS + "{{ '<|im_end|>\\n' }}{% endgeneration %}",
        "{{ '<|im_start|>assistant\\n<think>\\n' }}",
    ),
    "llama 2": _SYSTEM_FIRST
    + "{% for message in rest %}"
    + _ALTERNATE
    + "{% if loop.index0 == 0 and first %}{% set text = '<<SYS>>\\n' + first + '\\n<</SYS>>\\n\\n' + message.content %}"
    "{% else %}{% set text = message.content %}{% endif %}{% if message.role == 'user' %}"
    "{{ bos_token + '[INST] ' + text.strip() + ' [/INST]' }}{% else %}{% generation %}{{ ' ' + text.strip() + ' ' + "
    "eos_token }}{% endgeneration %}{% endif %}{% endfor %}",
    "llama 3": _turns(
        "{{ '<|header|>' + message.role + '<|/header|>\\n\\n' + message.content | trim + '<|eot_id|>' }}",
        _said("{{ '<|header|>assistant<|/header|>\\n\\n' }}", "{{ '<|eot_id|>' }}", "message.content | trim"),
        "{{ '<|header|>assistant<|/header|>\\n\\n' }}",
        "{{ bos_token }}",
    ),
    "mistral": "{{ bos_token }}"
    + _SYSTEM_FIRST
    + _LAST_QUESTION
    + "{% for message in rest %}{% if message.role == 'user' %}{{ '[INST] ' }}"
    "{% if message == messages[ns.last] and first %}{{ first + '\\n\\n' }}{% endif %}{{ message.content + '[/INST]' }}"
    "{% elif message.tool_calls %}{% generation %}{{ '[TOOL_CALLS] ' + (message.tool_calls | tojson) + eos_token }}"
    "{% endgeneration %}{% elif message.role == 'tool' %}{{ '[TOOL_RESULTS] ' + message.content + '[/TOOL_RESULTS]' }}"
    "{% else %}{% generation %}{{ ' ' + message.content + eos_token }}{% endgeneration %}{% endif %}{% endfor %}",
    "gemma": "{{ bos_token }}{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}"
    "{% endif %}{% for message in messages %}"
    + _ALTERNATE
    + "{% if message.role == 'assistant' %}{{ '<turn>model\\n' }}{% generation %}{{ message.content | trim + "
    "'</turn>\\n' }}{% endgeneration %}{% else %}{{ '<turn>user\\n' + message.content | trim + '</turn>\\n' }}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<turn>model\\n' }}{% endif %}",
    "gemma 3": "{{ bos_token }}"
    + _SYSTEM_FIRST
    + "{% for message in rest %}{{ '<turn>' + ('model' if message.role == 'assistant' else message.role) + '\\n' + "
    "(first + '\\n\\n' if loop.first and first else '') }}{% if message.role == 'assistant' %}{% generation %}"
    "{{ message.content | trim + '</turn>\\n' }}{% endgeneration %}{% else %}"
    "{{ message.content | trim + '</turn>\\n' }}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<turn>model\\n' }}{% endif %}",
    "phi 3": _turns(
        "{{ '<|' + message.role + '|>\\n' + message.content + '<|end|>\\n' }}",
        "{{ '<|assistant|>\\n' }}{% generation %}{{ message.content + '<|end|>\\n' }}"
        "{{ eos_token if loop.last and not add_generation_prompt else '' }}{% endgeneration %}",
        "{{ '<|assistant|>\\n' }}",
        after="{% if not add_generation_prompt and messages[-1].role != 'assistant' %}{{ eos_token }}{% endif %}",
    ),
    "phi 4": _turns(
        "{{ '<|im_start|>' + message.role + '<|im_sep|>' + message.content + '<|im_end|>' }}",
        _said("{{ '<|im_start|>assistant<|im_sep|>' }}", "{{ '<|im_end|>' }}"),
        "{{ '<|im_start|>assistant<|im_sep|>' }}",
    ),
    "deepseek 2": _turns(
        "{{ 'User: ' + message.content + '\\n\\n' }}",
        _said("{{ 'Assistant:' }}", "{{ eos_token }}", "' ' + message.content"),
        "{{ 'Assistant:' }}",
        "{{ bos_token }}",
        "{{ message.content + '\\n\\n' }}",
    ),
    "deepseek r1": "{% set ns = namespace(tool=false) %}{{ bos_token }}{% for message in messages %}"
    "{% if message.role == 'system' %}{{ message.content }}{% endif %}{% endfor %}{% for message in messages %}"
    "{% if message.role == 'user' %}{% set ns.tool = false %}{{ '<|User|>' + message.content }}"
    "{% elif message.role == 'tool' %}{% set ns.tool = true %}{{ '<|output|>' + message.content + '<|/output|>' }}"
    "{% elif message.role == 'assistant' %}{{ '' if ns.tool else '<|Assistant|>' }}{% generation %}"
    "{{ (message.content or '').split('</think>')[-1] }}{% for call in message.tool_calls or [] %}"
    "{{ '<|call|>' + call.function.name + '\\n' + (call.function.arguments | tojson) + '<|/call|>' }}{% endfor %}"
    "{{ eos_token }}{% endgeneration %}{% set ns.tool = false %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt and not ns.tool %}{{ '<|Assistant|><think>\\n' }}{% endif %}",
    "zephyr": _turns(
        "{{ '<|' + message.role + '|>\\n' + message.content + eos_token + '\\n' }}",
        _said("{{ '<|assistant|>\\n' }}", "{{ eos_token + '\\n' }}"),
        "{{ '<|assistant|>\\n' }}",
    ),
    "vicuna": _SYSTEM_FIRST
    + "{{ first or 'A chat between a curious user and an assistant.' }}{% for message in rest %}"
    "{% if message.role == 'assistant' %}{{ ' ASSISTANT:' }}{% generation %}{{ ' ' + message.content + eos_token }}"
    "{% endgeneration %}{% else %}{{ ' USER: ' + message.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ ' ASSISTANT:' }}{% endif %}",
    "alpaca": _turns(
        "{{ '### Instruction:\\n' + message.content + '\\n\\n' }}",
        _said("{{ '### Response:\\n' }}", "{{ eos_token + '\\n\\n' }}"),
        "{{ '### Response:\\n' }}",
        "{{ bos_token }}",
        "{{ message.content + '\\n\\n' }}",
    ),
    "command r": "{{ bos_token }}"
    + _SYSTEM_FIRST
    + "{% if first %}{{ '<|turn|><|SYSTEM|>' + first + '<|/turn|>' }}{% endif %}{% for message in rest %}"
    + _ALTERNATE
    + "{% if message.role == 'user' %}{{ '<|turn|><|USER|>' + message.content.strip() + '<|/turn|>' }}{% else %}"
    "{{ '<|turn|><|CHATBOT|>' }}{% generation %}{{ message.content.strip() + '<|/turn|>' }}{% endgeneration %}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|turn|><|CHATBOT|>' }}{% endif %}",
    "glm 4": _turns(  # nothing ends an answer
        "{{ '<|' + message.role + '|>\\n' + message.content }}",
        _said("{{ '<|assistant|>\\n' }}", ""),
        "{{ '<|assistant|>\\n' }}",
        "{{ '[gMASK]<sop>' }}",
        "{{ ('<|observation|>' if message.role == 'tool' else '<|system|>') + '\\n' + message.content }}",
    ),
    "granite": _turns(
        "{{ '<|start_of_role|>' + message.role + '<|end_of_role|>' + message.content + '<|end_of_text|>\\n' }}",
        _said("{{ '<|start_of_role|>assistant<|end_of_role|>' }}", "{{ '<|end_of_text|>\\n' }}"),
        "{{ '<|start_of_role|>assistant<|end_of_role|>' }}",
    ),
    "channels": _turns(  # as of gpt-oss: the last answer of a chat ends with another token
        "{{ '<|start|>' + message.role + '<|message|>' + message.content + '<|end|>' }}",
        "{{ '<|start|>assistant' }}{% generation %}{{ '<|channel|>final<|message|>' + message.content }}"
        "{{ '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' }}{% endgeneration %}",
        "{{ '<|start|>assistant' }}",
        "{{ '<|start|>system<|message|>Be helpful.<|end|>' }}",
    ),
}
"""Templates with ``{% generation %}`` around their answers."""

TEMPLATES = {name: re.sub(r"\{% (end)?generation %\}", "", template) for name, template in MARKED.items()}
"""The same without marks, as models have them."""


def _user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def _answer(content: Any, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


_SYSTEM = {"role": "system", "content": "Be brief."}
_CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Bonn"}}}
_TOOL = {"role": "tool", "content": "dry"}

CHATS: dict[str, list[dict[str, Any]]] = {
    "one answer": [_user("Two and two?"), _answer("Four.")],
    "several turns": [_user("Hi"), _answer("Hello <b>[1]"), _user("More?"), _answer("Yes,\ntwo."), _user("Bye")],
    "system": [_SYSTEM, _user("Hi"), _answer("Hello"), _user("More?"), _answer("No.")],
    "begins with an answer": [_answer("Welcome!"), _user("Hi"), _answer("Hello")],
    "begins with system and answer": [_SYSTEM, _answer("Welcome!"), _user("Hi"), _answer("Hello")],
    "two answers": [_user("Two?"), _answer("Yes."), _answer("Two."), _user("And?"), _answer("Three.")],
    "two questions": [_user("One?"), _user("Two?"), _answer("Yes.")],
    "tool": [_user("Rain?"), _answer("", tool_calls=[_CALL]), _TOOL, _answer("No.")],
    "tool and words": [_user("Rain?"), _answer("I look.", tool_calls=[_CALL]), _TOOL, _answer("No."), _user("OK")],
    "empty answer": [_user("Hi"), _answer(""), _user("Hello?"), _answer("Yes.")],
    "empty question": [_user(""), _answer("What?")],
    "system only": [_SYSTEM],
    "unicode": [
        _user("Grüße \U0001f600?"),
        _answer("\u4f60\u597d \U0001f600\n\u05e9\u05dc\u05d5\u05dd"),
        _user("e\u0301"),
    ],
    "spaces": [_user("  Hi \n"), _answer("\n Hello  \n"), _user("x"), _answer(" y")],
    "thoughts": [
        _user("Two?"),
        _answer("<think>\nOne and one.\n</think>\n\nYes."),
        _user("And?"),
        _answer("<think>\nMore\n</think>\n\nThree."),
    ],
    "the same words": [_user("a"), _answer("a"), _user("a"), _answer("a"), _user("a"), _answer("a")],
}
"""Chats by what is unusual in them."""
