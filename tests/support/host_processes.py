"""Runs engines whose devices belong to several processes.

As a script, this module is one of the processes. Its argument is JSON with the process's rank, a
port, and a plan: the engines to build, in order.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parents[1]
LIMIT = 4  # seconds until a process that does not answer counts as lost


def start(
    rank: int, port: int, plan: list[dict[str, Any]], *, count: int = 2, is_trainer: bool = False
) -> subprocess.Popen:
    """Start process `rank` of `count` processes. It has one device, and follows `plan`.

    If `is_trainer`, the process initialises `jax.distributed` before it builds engines.
    """
    paths = os.pathsep.join([str(TESTS.parent), str(TESTS)])
    own = {"rank": rank, "nnodes": count, "port": port, "is_trainer": is_trainer}
    given = json.dumps({**own, "plan": plan})
    return subprocess.Popen(
        [sys.executable, "-u", "-m", __name__, given],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": paths, "JAX_PLATFORMS": "cpu"},
    )


def run_all(folder: str, updated: str, **options: Any) -> dict[str, Any]:
    """Run an engine through all events that change its steps. Return JSON-compatible results.

    `updated` is a folder of new weights.
    """
    import pytest
    from support.engines import SIZES, generate, give_pages, hold_pages, random_prompts
    from support.refusals import refusal

    from specjax import SamplingParams
    from specjax.host.speculation.policy import StaticPolicy
    from specjax.rl import RolloutEngine

    found: dict[str, Any] = {}
    params = [
        SamplingParams(max_tokens=14, temperature=t, seed=i, logprobs=2, ignore_eos=True)
        for i, t in enumerate([0.0, 0.8, 0.8])
    ]
    prompts = random_prompts(21, 9, 30, vocab_size=90)
    with RolloutEngine(folder, **{**SIZES, **options}) as rl:
        llm, engine = rl._llm, rl._llm.engine

        def note(name: str) -> None:
            outputs = [output.outputs[0] for output in generate(llm, prompts, params)]
            logprobs = [[*map(listed, each)] for each in (one.logprobs for one in outputs)]
            found[name] = [one.token_ids for one in outputs], logprobs

        if engine.programs.num_processes > 1:
            refusal(lambda: rl.update_weights(rl.params.target), "nnodes=2", "give the folder")
            with pytest.raises(NotImplementedError, match="other processes have some"):
                rl.checksum()
        note("first")
        metrics = llm.metrics()
        found["counts"] = metrics.num_draft_tokens, metrics.num_accepted_tokens
        engine.set_policy(StaticPolicy(1))
        note("with another K")
        engine.set_policy(StaticPolicy(3))
        compiled = len(engine.programs.ready)
        note("from the prefix cache")
        found["hits"] = llm.metrics().prefix_cache_hits
        taken = hold_pages(llm, 12)
        note("preempted")
        found["num_preemptions"] = llm.metrics().num_preemptions
        give_pages(llm, taken)
        left = llm.generate_stream(prompts, params)
        next(left)
        left.close()
        note("after an abort")
        for level in 1, 2:
            rl.sleep(level)
            rl.wake_up()
        note("after a sleep")
        rl.update_weights(updated)
        note("updated")
        assert len(engine.programs.ready) == compiled
        engine.programs.elsewhere(has_programs, compiled)
    return json.loads(json.dumps(found))


def serve_all(folder: str, **options: Any) -> dict[str, Any]:
    """Return what an `AsyncLLM` gives to concurrent callers. Some stream, abort or leave."""
    import asyncio

    from support.engines import SIZES, random_prompts

    from specjax import AsyncLLM, SamplingParams

    sentence = {"structured_outputs": {"regex": "[A-Z][a-z ]{3,12}!"}}
    params = [
        SamplingParams(max_tokens=16, temperature=0.8 * (i != 1), seed=i, **more)
        for i, more in enumerate(
            ({"logprobs": 2}, sentence, {"n": 2, "top_p": 0.8, "repetition_penalty": 1.2})
        )
    ]
    prompts = random_prompts(21, 9, 30, vocab_size=90)

    async def ask(llm: AsyncLLM, i: int) -> Any:
        every = [output async for output in llm.generate(prompts[i], params[i])]
        assert len(every) > 1
        found = [(one.token_ids, one.finish_reason, one.logprobs) for one in every[-1].outputs]
        return [(*one[:2], [*map(listed, one[2] or ())]) for one in found]

    async def leave(llm: AsyncLLM, name: str) -> bool:
        long = SamplingParams(max_tokens=90, temperature=0, ignore_eos=True)
        async for _ in llm.generate(prompts[0], long, request_id=name):
            return await llm.abort(name) if name == "aborted" else True
        return False

    async def serve() -> dict[str, Any]:
        async with AsyncLLM(folder, **{**SIZES, **options}) as llm:
            callers = *(ask(llm, i) for i in range(3)), leave(llm, "aborted"), leave(llm, "left")
            found = await asyncio.gather(*callers)
            metrics = llm.metrics()
            found.append(metrics.num_accepted_tokens > 0)
            return {"found": found}

    return json.loads(json.dumps(asyncio.run(serve())))


def has_programs(follower: Any, count: int) -> None:
    """Check that the other process has compiled `count` programs, like process 0."""
    assert len(follower.programs.ready) == count


def listed(entry: dict[int, Any]) -> list[tuple[int, float]]:
    """Return pairs (token, log-probability)."""
    return [(token, one.logprob) for token, one in entry.items()]


def same(found: Any, expected: Any) -> bool:
    """Return whether two results are equal, and logarithms of probabilities differ by at most 1e-3.

    They may differ because sums over devices change the last digits.
    """
    if isinstance(expected, float):
        return abs(found - expected) <= 1e-3
    if isinstance(expected, dict):
        return found.keys() == expected.keys() and all(same(found[k], expected[k]) for k in found)
    if isinstance(expected, list):
        return len(found) == len(expected) and all(map(same, found, expected))
    return found == expected


def attempt(
    rank: int | None, *, folder: str, own: Any = (), then: str = "", common: Any, **options: Any
):
    """Build an LLM over all processes, run one part of the plan, and return the result.

    Args:
        own: further options of single processes, by rank.
        then: what to run: "run all", "serve", or "" for one stream that waits for the test.
        common: options of all processes.
    """
    import pytest
    from support.engines import SIZES

    from specjax import LLM, SamplingParams, follow

    given = {**options, **dict(own).get(str(rank), {})}
    folder = given.pop("folder", folder)
    if then:
        if rank:
            return follow(folder, **common)
        run = {"run all": run_all, "serve": serve_all}[then]
        return run(folder, tensor_parallel_size=common["nnodes"], **given, **common)
    if rank:
        return follow(folder, **{**common, **given})
    with LLM(folder, tensor_parallel_size=2, **{**SIZES, **given}, **common) as llm:
        params = SamplingParams(max_tokens=100, temperature=0, ignore_eos=True)
        edited = SamplingParams(logits_processors=[edit])
        with pytest.raises(NotImplementedError, match="nnodes=2 processes run each step"):
            llm.generate([[1]], edited, use_tqdm=False)
        stream = llm.generate_stream([[1, 2, 3]], params)
        next(stream)
        say(ready=True)
        sys.stdin.readline()
        return sum(1 for _ in stream)


def edit(token_ids: Any, length: Any, logits: Any) -> Any:
    """Return the logits unchanged, as a logits processor."""
    return logits


def say(**content: Any) -> None:
    """Print a line of JSON, which the test reads."""
    print(json.dumps(content), flush=True)


def main() -> None:
    """Run all parts of the plan, and print the result of each part."""
    import jax
    from support.compilations import compile_in_child

    given = json.loads(sys.argv[1])
    jax.config.update("jax_num_cpu_devices", 1)
    compile_in_child(TESTS.parent)
    rank, common = given["rank"], {"nnodes": given["nnodes"], "distributed_timeout_seconds": LIMIT}
    if given["is_trainer"]:
        jax.config.update("jax_enable_recoverability", True)
        jax.distributed.initialize(f"127.0.0.1:{given['port']}", given["nnodes"], rank)
        assert jax.device_count() == given["nnodes"]
    else:
        common |= {"node_rank": rank, "master_port": given["port"]}
    for part in given["plan"]:
        try:
            say(found=attempt(rank, common=common, **part))
        except (Exception, KeyboardInterrupt) as error:
            say(error=f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    main()
