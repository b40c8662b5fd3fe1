"""Names by which servers of language models say whether a batch is prefill or decode.

Ranges around the run of the model, as their sources write them:

vLLM          ``execute_context_2(640)_generation_14(14)``, requests and (tokens) of both parts; newer versions
              put a number after ``execute_`` and more between the brackets (``annotate_profile`` of
              vllm/v1/worker/gpu_worker.py)
SGLang        ``step[EXTEND bs=2 toks=107]``, ``step[DECODE bs=63]``, ``step[MIXED bs=2]``; first versions wrote
              ``prefill`` (sglang pull request 23419). ``TARGET_VERIFY`` runs the model on guessed further
              tokens, which is decoding; other modes say neither.
TensorRT-LLM  ``[Executor] _forward_step 7: 1 ctx reqs, 640 ctx tokens, 14 gen reqs`` (``_forward_step`` of
              tensorrt_llm/_torch/pyexecutor/py_executor.py)

Besides, ranges that the user named ``prefill`` or ``decode``, also followed by a number or bracket.
"""

from __future__ import annotations

import re

from thence.model.phases import Serving

__all__ = ["serving_of"]

_VLLM = re.compile(r"execute_(?:\d+_)?context_(\d+)\(.*\)_generation_(\d+)\(.*\)")
_SGLANG = re.compile(r"step\[(\w+)(?: [^\]]*)?\]")
_TENSORRT_LLM = re.compile(
    r"(?:\[Executor\] )?_forward_step \d+: (\d+) ctx reqs(?:, \d+ ctx tokens)?, (\d+) gen reqs.*"
)
_MODES = {
    "extend": Serving.PREFILL,
    "prefill": Serving.PREFILL,
    "split_prefill": Serving.PREFILL,
    "decode": Serving.DECODE,
    "target_verify": Serving.DECODE,
    "mixed": Serving.MIXED,
}
_USERS = re.compile(r"(prefill|decode)(?:[\s:#_]*\d+|\s*[(\[].*)?", re.IGNORECASE)


def serving_of(name: str) -> Serving | None:
    """What the name of a range says, None if nothing."""
    counted = _VLLM.fullmatch(name) or _TENSORRT_LLM.fullmatch(name)
    if counted:
        prefill, decode = (int(count) > 0 for count in counted.groups())
        if prefill and decode:
            return Serving.MIXED
        return Serving.PREFILL if prefill else Serving.DECODE if decode else None
    step = _SGLANG.fullmatch(name)
    if step:
        return _MODES.get(step[1].lower())
    user = _USERS.fullmatch(name)
    return Serving(user[1].lower()) if user else None
