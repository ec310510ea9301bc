"""The command line: parses arguments, then imports the module of the given command.

This module does not import JAX, so that `--help` is fast.
"""

import argparse
import errno
import os
import signal
import sys
from collections.abc import Callable, Sequence
from importlib import import_module

from specjax import __version__
from specjax.checkpoint.demo import TARGET
from specjax.commands import arguments, bench, compile_arguments, serve_arguments, train
from specjax.commands.vllm_arguments import respelled
from specjax.host.leaving import INTERRUPTED, leave_interrupted

# The module of each command; its `run(args)` runs it.
_MODULES = {
    "generate": "specjax.commands.generate",
    "serve": "specjax.commands.serve",
    "bench": "specjax.bench.speculation",
    **{f"bench {name}": one.module for name, one in bench.SUBCOMMANDS.items()},
    "bench sweep serve": "specjax.commands.bench_sweep",
    "profile": "specjax.bench.profile",
    "profile show": "specjax.bench.profile_show",
    "quantize": "specjax.commands.quantize",
    "train": "specjax.train.recipes",
    "info": "specjax.commands.info",
    "info --check": "specjax.commands.check",
    "info --compile": "specjax.commands.compile_report",
}
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_NEEDS_EXTRA = {
    **{"optax": "train", "orbax": "train", "matplotlib": "plot"},
    "aiohttp": "bench",
    **dict.fromkeys(("starlette", "uvicorn", "msgspec", "prometheus_client"), "serve"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command, and return its exit code.

    The code is 0 for success, 1 if `info --check` finds a fault, 2 for errors that the user can
    fix, 130 after an interrupt, and 141 if the reader of the output has closed the pipe.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    if argv[:1] == ["serve"]:
        try:
            read = import_module("specjax.commands.config_file")
            argv = list(read.with_config(respelled(argv)))
        except ValueError as error:
            return _fail(str(error))
    args = build_parser().parse_args(argv)
    command = args.command
    for place, name in enumerate(("subcommand", "sweep_kind"), start=1):
        if word := getattr(args, name, None):
            # Options before a subcommand would be ignored.
            if argv[place] != word:
                return _fail(f"{argv[place]} precedes {word}; put options after the subcommand")
            command = f"{command} {word}"
    if command == "info" and (args.compile is not None or args.check):
        command = "info --check" if args.check else "info --compile"
    try:
        return import_module(_MODULES[command]).run(args)
    except ModuleNotFoundError as error:
        extra = _NEEDS_EXTRA.get((error.name or "").partition(".")[0])
        if extra is None:
            raise
        return _fail(
            f"specjax {command} needs the package {error.name}; pip install 'specjax[{extra}]'"
        )
    except (ValueError, NotImplementedError) as error:
        return _fail(str(error))
    except BrokenPipeError:
        # Nobody reads the output any more; discard the rest of the buffer.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except OSError as error:
        if error.filename is None:
            raise
        remedy = "; free some space, or choose another path" if error.errno in _FULL else ""
        return _fail(f"{error.filename}: {error.strerror}{remedy}")
    except KeyboardInterrupt as error:
        _tell("interrupted")
        leave_interrupted(_tell, is_second=isinstance(error.__context__, KeyboardInterrupt))
        return INTERRUPTED


def _fail(message: str) -> int:
    _tell(f"error: {' '.join(message.split())}")
    return 2


def _tell(message: str) -> None:
    print(f"specjax: {message}", file=sys.stderr, flush=True)


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of all commands."""
    parser = argparse.ArgumentParser(prog="specjax", description="Lossless speculative decoding.")
    parser.add_argument("--version", action="version", version=f"specjax {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def add(name: str, add_arguments: Callable[[argparse.ArgumentParser], None], text: str) -> None:
        command = commands.add_parser(name, help=text, description=text, allow_abbrev=False)
        add_arguments(command)

    add("generate", _add_generate, "Continue prompts.")
    add("serve", serve_arguments.add_arguments, serve_arguments.DESCRIPTION)
    add("bench", bench.add_arguments, bench.DESCRIPTION)
    add("profile", bench.add_profile_arguments, bench.PROFILE_DESCRIPTION)
    add("quantize", _add_quantize, "Write a plain checkpoint with its weights in 8 or 4 bits.")
    add("train", train.add_arguments, "Train a model or a drafter.")
    add("info", _add_info, "Describe a checkpoint and the memory that it needs.")
    return parser


def _add_generate(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prompts", nargs="*", metavar="PROMPT")
    parser.add_argument("--model", default=TARGET, help=f"{arguments.MODEL_HELP}; the default")
    parser.add_argument(
        "--prompts-file",
        metavar="FILE",
        help='a prompt per line; in a .jsonl, rows with "prompt", "question" or "prompt_token_ids"',
    )
    parser.add_argument("--chat", action="store_true", help="prompts are a user's messages")
    parser.add_argument(
        "--json", action="store_true", help="print one line of JSON per output, then one of metrics"
    )

    sampling = parser.add_argument_group("sampling")
    sampling.add_argument("--max-tokens", type=int, default=128, help="default: %(default)s")
    sampling.add_argument(
        "--temperature", type=float, default=0.0, help="0, the default, is greedy"
    )
    sampling.add_argument("--top-p", type=float, default=1.0, metavar="P", help="1 keeps all")
    sampling.add_argument("--top-k", type=int, default=0, metavar="K", help="0 keeps all")
    sampling.add_argument("--min-p", type=float, default=0.0, metavar="P", help="0 keeps all")
    sampling.add_argument("--n", type=int, default=1, metavar="N", help="outputs per prompt")
    sampling.add_argument("--seed", type=int, help="seed of every prompt")
    sampling.add_argument(
        "--stop",
        action="append",
        default=[],
        metavar="TEXT",
        help="text that ends outputs; may be repeated",
    )
    sampling.add_argument("--stop-token-id", type=int, action="append", default=[], metavar="ID")
    sampling.add_argument("--ignore-eos", action="store_true", help="go on past the end")
    sampling.add_argument(
        "--sampling-params",
        metavar="JSON",
        default="{}",
        help='fields of SamplingParams, such as \'{"min_tokens": 8, "logprobs": 1}\'',
    )

    arguments.add_speculation(parser)
    arguments.add_engine(parser)
    parser.add_argument("--max-num-batched-tokens", type=int, help="maximum tokens per step")
    arguments.add_quantization(parser)
    arguments.add_devices(parser)


def _add_quantize(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help=arguments.MODEL_HELP)
    parser.add_argument("out", metavar="OUT", help="the folder to write")
    arguments.add_quantization(parser, required=True)


def _add_info(parser: argparse.ArgumentParser) -> None:
    text = f"{arguments.MODEL_HELP}; or a config without weights, in a folder or a .json file"
    # Optional, as --model can be given instead.
    parser.add_argument("positional_model", nargs="?", metavar="MODEL", help=text)
    parser.add_argument("--model", metavar="CONFIG", help="the same, as an option")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--devices",
        type=int,
        metavar="N",
        help="compute what each of N GPUs would hold, as tensor_parallel_size divides the model",
    )
    parser.add_argument(
        "--check",
        action="store_true",
        help="run the drafter on answers of the target, and name its problems",
    )
    parser.add_argument(
        "--data",
        metavar="FILE",
        help='for --check: a .jsonl of "question" (a message) or "text" (a whole prompt)',
    )
    arguments.add_speculation(parser)
    arguments.add_engine(parser)
    arguments.add_quantization(parser)
    compile_arguments.add_arguments(parser)
