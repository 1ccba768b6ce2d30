"""Request fields that vLLM or OpenAI know and Octavo does not have yet, with the values that ask for nothing.

A field at one of its neutral values changes no answer and is let pass; at any other it is refused by name. `None` is
neutral everywhere. Fields that stand neither here nor in `requests` are unknown: ignored, but logged and counted.
"""

from __future__ import annotations

from typing import Any

from octavo.errors import NotSupported
from octavo.wire.errors import shown

SAMPLING: dict[str, tuple[Any, ...]] = {
    "guided_decoding_backend": ("auto", "guidance"),
    "watermarking": (False,),
    "return_weight_versions": (False,),
    "routed_experts_prompt_start": (0,),
    "return_token_offsets": (False,),
    "mm_payload": (),
    "return_mm_kwargs": (False,),
    "kv_transfer_params": (),
    "ec_transfer_params": (),
    "vllm_xargs": ({},),
}

CHAT: dict[str, tuple[Any, ...]] = SAMPLING | {
    "tools": (),
    "tool_choice": ("none",),
    "functions": (),
    "function_call": ("none",),
    "parallel_tool_calls": (True, False),
    "reasoning_effort": (),
    "include_reasoning": (True,),
    "echo": (False,),
    "documents": (),
    "chat_template": (),
    "media_io_kwargs": ({},),
    "mm_processor_kwargs": ({},),
    "return_prompt_text": (False,),
    "modalities": (["text"],),
    "audio": (),
    "web_search_options": (),
}

COMPLETION: dict[str, tuple[Any, ...]] = SAMPLING | {"suffix": ("",), "prompt_embeds": ()}


LOAD_ADAPTER: dict[str, tuple[Any, ...]] = {"is_3d_lora_weight": (False,)}
UNLOAD_ADAPTER: dict[str, tuple[Any, ...]] = {"lora_int_id": ()}


def check(extra: dict[str, Any], refused: dict[str, tuple[Any, ...]]) -> list[str]:
    """The names in `extra` that nobody knows. Raises NotSupported for a refused field that asks for something."""
    unknown = []
    for name, value in extra.items():
        if name not in refused:
            unknown.append(name)
        elif value is not None and not any(type(value) is type(n) and value == n for n in refused[name]):
            neutral = [n for n in refused[name] if n is not None]
            only = f"set it to {' or '.join(map(shown, neutral))} or leave it out" if neutral else "leave it out"
            raise NotSupported(f"{name} is not supported yet", fix=only, param=name)
    return unknown
