"""Trains a model to add by GRPO. `specjax serve`, another process, generates the rollouts.

    python examples/grpo_http.py

The trainer knows the server only by HTTP: it sends questions, gets answers with the log-probability
of each token, and sends new weights. With `--transport folder`, the weights pass through a folder
in memory that both processes share. With `--transport wire`, they are the body of a request. The
server drafts with EAGLE-3 and adaptive K, which changes no answer's distribution. The task is the
same as in `grpo_arithmetic.py`, which runs its engines in the trainer's process.
"""

import argparse
import json
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from arithmetic import MAX_TOKENS, Question, split_questions
from grpo import begin, grpo_loss, improve, make_optimizer, make_update, rewards
from imitation import Imitation, Policy, imitate

from specjax import SamplingParams
from specjax.checkpoint.hub import resolve
from specjax.device.models.registry import load_model
from specjax.rl import Rollout, RolloutBatch, Span, save_model
from specjax.text.tokenizer import load_tokenizer, read_eos_ids

MODEL = "demo-llama"
SHARED = Path("/dev/shm")  # a file system in memory
TIMEOUT = 300  # seconds to load a model, or to generate
FLAGS = """
--drafter demo-llama-eagle3 --adaptive --k 2 --logprobs-mode processed --max-model-len 64
--max-num-seqs 16 --decode-batches [16] --prefill-shapes [[4,16]] --max-num-batched-tokens 64
--page-size 4 --uvicorn-log-level warning --disable-uvicorn-access-log
""".split()


@dataclass(frozen=True, kw_only=True)
class Settings:
    """All settings of a run."""

    steps: int = 20
    questions: int = 8  # number per step
    samples: int = 8  # number per question
    minibatches: int = 2  # number per step
    learning_rate: float = 1e-4
    imitation_steps: int = 80
    held_out: int = 120  # number of questions
    transport: str = "folder"
    seed: int = 0


class Step(NamedTuple):
    """The measurements of a GRPO step."""

    number: int
    reward: float
    acceptance_length: float
    rollout_seconds: float
    update_seconds: float  # to update the policy
    sync_seconds: float  # until the server has the new weights


HEADER = "step  reward  accepted  rollouts (s)  update (s)  sync (s)"
LINE = "{:4}  {:6.3f}  {:8.2f}  {:12.2f}  {:10.2f}  {:8.2f}"


class Client:
    """Sends requests to the server."""

    def __init__(self, port: int, root: Path):
        self._port, self._root = port, root

    def send(self, path: str, body: Any = None, kind: str = "application/json") -> bytes:
        """Send a request (GET without a body), and return the answer's body.

        Raises:
            RuntimeError: the server refuses the request.
        """
        data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        connection = HTTPConnection("127.0.0.1", self._port, timeout=TIMEOUT)
        method = "GET" if body is None else "POST"
        connection.request(method, path, data, {"Content-Type": kind})
        answer = connection.getresponse()
        content = answer.read()
        connection.close()
        if answer.status != 200:
            raise RuntimeError(f"{path} answered {answer.status}: {content.decode()}")
        return content

    def roll_out(self, questions: Sequence[Question], samples: int, version: int) -> RolloutBatch:
        """Return answers from the weights with this version."""

        def ask(i: int) -> list[Rollout]:
            seed = 1000 * version + i
            params = SamplingParams(n=samples, seed=seed, max_tokens=MAX_TOKENS, temperature=1.0)
            asked = {"prompt": questions[i].prompt, "logprobs": 0, "return_token_ids": True}
            asked |= {"n": samples, "seed": seed, "max_tokens": MAX_TOKENS, "temperature": 1.0}
            answer = json.loads(self.send("/v1/completions", asked))
            assert answer["weight_versions"] == [version], "the server has other weights"
            prompt = np.array(answer["choices"][0]["prompt_token_ids"], np.int32)
            return [
                Rollout(
                    prompt_token_ids=prompt,
                    token_ids=np.array(choice["token_ids"], np.int32),
                    logprobs=np.array(choice["logprobs"]["token_logprobs"], np.float32),
                    raw_logprobs=None,
                    versions=(Span(version, len(choice["token_ids"])),),
                    finish_reason=choice["finish_reason"],
                    text=choice["text"],
                    params=params,
                    seed=seed,
                    prompt_index=i,
                    sample_index=choice["index"],
                )
                for choice in answer["choices"]
            ]

        with ThreadPoolExecutor(len(questions)) as threads:
            found = threads.map(ask, range(len(questions)))
            return RolloutBatch(rollout for answers in found for rollout in answers)

    def update(self, policy: Policy, params: Any, version: int, transport: str) -> None:
        """Send new weights."""
        name = f"version-{version}"
        folder = self._root / name
        save_model(folder, policy.model, params, MODEL)
        if transport == "folder":
            body = {"update_info": {"path": name}, "weight_version": version}
            self.send("/update_weights", body)
        else:
            data = (folder / "model.safetensors").read_bytes()
            path = f"/update_weights?weight_version={version}"
            self.send(path, data, "application/octet-stream")
        shutil.rmtree(folder)

    def rounds(self) -> np.ndarray:
        """Return the numbers of rounds with drafts, and of accepted drafts, since the start."""
        lines = self.send("/metrics").decode().splitlines()
        names = ("spec_decode_num_drafts_total{", "spec_decode_num_accepted_tokens_total{")
        return np.array(
            [
                sum(float(line.split()[-1]) for line in lines if line.startswith(f"vllm:{name}"))
                for name in names
            ]
        )


@contextmanager
def served() -> Iterator[Client]:
    """Run a server in another process, and stop it at the end."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    shared = SHARED if SHARED.is_dir() else None
    with tempfile.TemporaryDirectory(prefix="specjax-grpo-", dir=shared) as root:
        command = [sys.executable, "-m", "specjax", "serve", MODEL, *FLAGS]
        command += ["--port", str(port), "--rl", "--rl-weights-root", root]
        process = subprocess.Popen(command)
        try:
            client = Client(port, Path(root))
            wait_for(client, process)
            yield client
        finally:
            process.terminate()
            process.wait()


def wait_for(client: Client, process: subprocess.Popen) -> None:
    """Wait until the server answers.

    Raises:
        RuntimeError: the server has ended.
    """
    while process.poll() is None:
        try:
            client.send("/health")
            return
        except (OSError, HTTPException):
            time.sleep(0.2)
    raise RuntimeError(f"the server has ended with status {process.returncode}; see its log above")


def run(settings: Settings, client: Client) -> tuple[float, float]:
    """Train by imitation, then by GRPO.

    Return the fraction of right answers to held-out questions before and after GRPO.
    """
    folder = resolve(MODEL)
    tokenizer = load_tokenizer(folder)
    assert tokenizer is not None
    eos_id = read_eos_ids(folder, tokenizer)[0]
    policy = Policy(*load_model(folder, np.dtype("float32")), tokenizer, eos_id)
    train, held_out = split_questions(settings.seed, settings.held_out)
    print(f"imitating {settings.imitation_steps} batches of worked answers", flush=True)
    how = Imitation(steps=settings.imitation_steps, seed=settings.seed)
    params = imitate(policy, train, how)
    client.update(policy, params, 1, settings.transport)
    optimizer = make_optimizer(settings.learning_rate)
    update, learner = make_update(policy.model, optimizer, grpo_loss), begin(params, optimizer)
    rng = np.random.default_rng(settings.seed)
    before_training = rewards(held_out, client.roll_out(held_out, 1, 1)).mean()
    print(HEADER, flush=True)
    for number in range(1, settings.steps + 1):
        chosen = rng.choice(len(train), settings.questions, replace=False)
        questions = [train[i] for i in chosen]
        counted, times = client.rounds(), [time.perf_counter()]
        answers = client.roll_out(questions, settings.samples, number)
        times.append(time.perf_counter())
        num_rounds, num_accepted = client.rounds() - counted
        judged = rewards(questions, answers)
        learner = improve(update, learner, answers, judged, settings.minibatches, rng)
        times.append(time.perf_counter())
        client.update(policy, learner.params, number + 1, settings.transport)
        times.append(time.perf_counter())
        length = 1 + num_accepted / num_rounds if num_rounds else 1.0
        step = Step(number, float(judged.mean()), length, *np.diff(times))
        print(LINE.format(*step), flush=True)
    after = rewards(held_out, client.roll_out(held_out, 1, settings.steps + 1)).mean()
    return float(before_training), float(after)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the example with options from the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    for name, default in asdict(Settings()).items():
        choices = ("folder", "wire") if name == "transport" else None
        parser.add_argument(
            f"--{name.replace('_', '-')}",
            type=type(default),
            default=default,
            choices=choices,
            help="default: %(default)s",
        )
    settings = Settings(**vars(parser.parse_args(arguments)))
    with served() as client:
        before, after = run(settings, client)
    print(f"right answers to held-out questions: {before:.2f} before, {after:.2f} after")


if __name__ == "__main__":
    main()
