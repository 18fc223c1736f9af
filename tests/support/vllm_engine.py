"""An engine of vLLM in a process of its own: `python -m tests.support.vllm_engine JOB RESULT`, both files of JSON.

Tests of the plugin on a GPU run each setting so: an engine keeps its memory as long as its process lives.
"""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ptxlab import gpu

COMMON: dict[str, Any] = {
    "dtype": "float16", "max_model_len": 1024, "enable_prefix_caching": False, "seed": 0,
    # A size of the cache that is given is not derived from free memory, which other tests' engines change meanwhile.
    "kv_cache_memory_bytes": 2 << 30, "gpu_memory_utilization": 0.05,
}  # fmt: skip
# By name, arguments of the engine under which texts are to be those of `COMMON` but for ties.
SETTINGS: dict[str, dict[str, Any]] = {
    "prefix caching": {"enable_prefix_caching": True},
    "chunks of 64": {"max_num_batched_tokens": 64, "max_num_seqs": 32, "enable_chunked_prefill": True},
    "chunks of 8,192": {"max_num_batched_tokens": 8192, "enable_chunked_prefill": True},
    "preemption": {"num_gpu_blocks_override": 40, "max_num_seqs": 64},
    "n-gram speculation": {
        "speculative_config": {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3},
    },
    "8-bit cache": {"kv_cache_dtype": "int8_per_token_head"},
    "head in INT8": {"additional_config": {"ptxlab": {"head": "int8"}}},
    "batch invariance": {},
    "kernels for Ampere": {"arch": "sm_80"},
}  # fmt: skip
ENVIRONMENT = {
    "batch invariance": {"VLLM_BATCH_INVARIANT": "1"},
    "kernels for Ampere": {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"},  # a process of the engine's own chooses by its GPU
}


def run_engine(
    folder: Path, work: Path, prompts: Sequence[Sequence[int]], environment: dict[str, str], **settings: Any
) -> dict[str, Any]:
    """Serve prompts (token ids) on an engine for `folder`, and return `tokens` and `logprobs` of each.

    Settings are arguments of the engine, and `new`, the tokens to make (64), `of_prompts`, whether logarithms of the
    prompts' likelihoods are wanted, and `arch`, for which kernels are chosen and compiled if not for the GPU at hand.
    Raises AssertionError with the errors and last lines of a process that fails.
    """
    job, answer = work / "job.json", work / "result.json"
    defaults = {"new": 64, "of_prompts": False, "arch": None}
    for_process = {name: settings.pop(name, default) for name, default in defaults.items()}
    engine = {"model": str(folder), **COMMON, **settings}
    job.write_text(
        json.dumps({"engine": engine, "prompts": [[*map(int, prompt)] for prompt in prompts], **for_process})
    )
    command = [sys.executable, "-m", "tests.support.vllm_engine", str(job), str(answer)]
    environment = {"VLLM_CACHE_ROOT": str(work / "compiled"), **environment}  # of this engine alone
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1200, check=False)
    assert ended.returncode == 0, what_failed(ended.stdout + ended.stderr)
    texts: dict[str, Any] = json.loads(answer.read_text())
    return texts


def what_failed(log: str) -> str:
    """Return the errors in a log and its last lines: the cause is among those of the engine's own processes."""
    lines = log.splitlines()
    return "\n".join([line for line in lines if "ERROR" in line][-60:] + lines[-30:])


def serve(job: dict[str, Any]) -> dict[str, Any]:
    """Do a job in this process."""
    from vllm import LLM, SamplingParams

    llm = LLM(**job["engine"])
    sampling = SamplingParams(
        temperature=0.0,
        max_tokens=job["new"],
        ignore_eos=True,
        detokenize=False,
        prompt_logprobs=0 if job["of_prompts"] else None,
    )
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in job["prompts"]], sampling, use_tqdm=False)
    logprobs = [
        [
            by_token[token].logprob
            for token, by_token in zip(output.prompt_token_ids[1:], (output.prompt_logprobs or [])[1:], strict=False)
        ]
        for output in outputs
    ]
    return {"tokens": [[*output.outputs[0].token_ids] for output in outputs], "logprobs": logprobs}


if __name__ == "__main__":
    given_job = json.loads(Path(sys.argv[1]).read_text())
    with gpu.compiling_for(given_job["arch"]):
        Path(sys.argv[2]).write_text(json.dumps(serve(given_job)))
