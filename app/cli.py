"""Runs the command line: ``triton-gateway serve | check | models | init | triton | key new``.

``main`` parses the arguments, runs one command and returns the exit status. Each command imports what it runs, because
all imports together take half a second.
"""

import argparse
import atexit
import gc
import logging
import os
import re
import shlex
import shutil
import stat
import sys
from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any, Literal, NoReturn, get_args, get_origin

import uvloop

import app
from app.core.errors import GatewayError, Unusable
from app.core.text import nearest, nearest_of, printable
from app.launcher.launch import create_environment, install_requirements, needs_environment
from app.launcher.machine import EmbeddedTritonError
from app.settings import (
    DEFAULT_REPOSITORY,
    PREFIX,
    Settings,
    SettingsError,
    check_credentials,
    config_beside,
    is_service_link,
    read_settings,
)
from app.triton.credentials import NO_CREDENTIALS

_INVALID_CHOICE = re.compile(r"argument COMMAND: invalid choice: '([^']*)'")


class CommandParser(argparse.ArgumentParser):
    """The parser of the command line and of each command. Suggests the nearest name for a mistyped one."""

    def parse_known_args(self, *given: Any, **named: Any) -> Any:
        namespace, unknown = super().parse_known_args(*given, **named)
        if unknown:
            options = [option for action in self._actions for option in action.option_strings]
            names = [word.partition("=")[0] for word in unknown if word.startswith("--")]
            found = next(filter(None, (nearest_of(name, options) for name in names)), None)
            suggestion = f"; did you mean '{found}'?" if found else ""
            self.error(f"unrecognized arguments: {' '.join(unknown)}{suggestion}")
        return namespace, unknown

    def error(self, message: str) -> NoReturn:
        if found := _INVALID_CHOICE.match(message):
            actions = [action for action in self._actions if isinstance(action, argparse._SubParsersAction)]
            commands = [name for action in actions for name in action.choices]
            message = f"there is no command '{found[1]}'{nearest(found[1], commands)}"
        super().error(message)


STARTER = Path(__file__).with_name("starter")


_EXAMPLES = """examples:
  triton-gateway init my_models                             write a small working model repository
  triton-gateway check my_models                            check it
  triton-gateway serve --embedded --models my_models        run it with the Triton of the wheel
  triton-gateway init --triton 127.0.0.1:8001               write a gateway.yaml for the models of a running Triton
  triton-gateway serve --triton 127.0.0.1:8001              serve them
"""
_SERVE_EXAMPLES = """examples:
  triton-gateway serve --embedded --models my_models
  triton-gateway serve --triton 127.0.0.1:8001 --config gateway.yaml
  triton-gateway serve --port 9000 --admin-port 9001 --log-format json
"""
_SHORT_FLAGS = {"triton_url": ["--triton"], "embedded_repository": ["--models"]}
UNUSABLE = 2
MAX_TEXT = 1000
"""Limit of characters for each line of an error, because names in a file can have any length."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command and returns the exit status.

    0: success. 1: ``check`` found an error, or the gateway failed unexpectedly. 2: a setting, a file, a port or a
    server that the command needs cannot be used.
    """
    given = vars(command_parser().parse_args(arguments))
    command = given.pop("command")
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # numpy's idle threads cost a short command 50 ms
    gc.set_threshold(50_000)  # imports make few cycles
    atexit.register(gc.freeze)  # Python's last collection looks at all modules otherwise, for 80 ms
    try:
        return int(command(given))
    except (Unusable, EmbeddedTritonError, GatewayError) as exc:
        if (given.get("log_format") or os.environ.get(f"{PREFIX}LOG_FORMAT")) == "json":  # for a log collector
            from app.observability.log import configure_logging

            configure_logging("error", "json")
            logging.getLogger(__name__).error("%s", exc)
        else:
            lines = [printable(line, MAX_TEXT) for line in f"triton-gateway: {exc}".split("\n")]
            print("\n".join(lines), file=sys.stderr)  # noqa: T201 - the command's own answer
        return UNUSABLE


def _answer(text: str) -> None:
    """Prints a command's answer. A reader that closes the pipe early, such as ``head``, is not an error."""
    try:
        print(text, flush=True)  # noqa: T201 - the command's own answer
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes stdout again when it exits


def _serve(given: dict[str, Any]) -> int:
    from app.process.serving import check_files, serve
    from app.process.supervision import require_free_ports

    is_check = given.pop("check")
    settings = _settings(given)
    if is_check:
        check_files(settings)
        return 0
    if given["embedded_repository"] is not None and not settings.embedded:
        raise SettingsError("--models is the repository of the embedded Triton: add --embedded")
    require_free_ports(settings.host, {f"{PREFIX}PORT": settings.port, f"{PREFIX}ADMIN_PORT": settings.admin_port})
    if settings.embedded:
        _prepare_models(settings)
        install_requirements(settings.models_venv, settings.embedded_repository)
    return uvloop.run(serve(settings))


def _settings(given: dict[str, Any]) -> Settings:
    """Reads the settings and configures the log. Raises SettingsError."""
    from app.observability.log import configure_logging

    settings = read_settings(os.environ, {name: value for name, value in given.items() if value is not None})
    configure_logging(settings.log_level, settings.log_format)
    if links := sorted(name for name, value in os.environ.items() if is_service_link(name, value)):
        text = (
            "ignored variables that Kubernetes injects for a Service called 'gateway' (set enableServiceLinks: false)"
        )
        logging.getLogger(__name__).warning(text, extra={"variables": links})
    return settings


def command_parser() -> argparse.ArgumentParser:
    """docs/reference/command-line.md is written from it."""
    parser = CommandParser(
        prog="triton-gateway",
        description=app.__doc__,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=app.__version__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    serving = commands.add_parser(
        "serve",
        help="run the gateway",
        description="Run the gateway. Every option is also an environment variable.",
        epilog=_SERVE_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    serving.set_defaults(command=_serve)
    for name, field in Settings.model_fields.items():
        default = str(field.default).lower() if isinstance(field.default, bool) else field.default
        known = "" if field.default_factory or default in (None, (), "") else f"default {default}; "
        _add_flag(serving, name, field.annotation, f"{field.description} ({known}{PREFIX}{name.upper()})")
    serving.add_argument(
        "--check", action="store_true", help="check the settings and the files that they name, and exit"
    )
    checking = commands.add_parser("check", help="check a model repository and gateway.yaml before you deploy")
    checking.set_defaults(command=_check)
    checking.add_argument(
        "repository",
        nargs="?",
        type=Path,
        default=DEFAULT_REPOSITORY,
        metavar="MODEL_REPOSITORY",
        help=f"the folder with the models (default: {DEFAULT_REPOSITORY})",
    )
    checking.add_argument(
        "--config",
        type=Path,
        help="the gateway.yaml to check against the models (default: that of MODEL_REPOSITORY; "
        f"for {DEFAULT_REPOSITORY}, ./gateway.yaml; with --triton, none)",
    )
    checking.add_argument("--triton", metavar="HOST:PORT", help="check the models of a running Triton instead")
    checking.add_argument(
        "--triton-version", metavar="VERSION", default="", help="name the known faults of this Triton, such as 2.51"
    )
    checking.add_argument("--strict", action="store_true", help="exit with status 1 for warnings too")
    checking.add_argument(
        "--format", choices=["text", "json"], default="text", help="format of the report (default: text)"
    )
    starting = commands.add_parser(
        "init",
        help="write a small working model repository with its gateway.yaml; with --triton, only a gateway.yaml for the "
        "models of a running Triton",
    )
    starting.set_defaults(command=_init)
    starting.add_argument("folder", type=Path, nargs="?", metavar="DIR", help="a new or empty folder")
    starting.add_argument("--triton", dest="triton_url", metavar="HOST:PORT", help="Triton's gRPC address")
    standalone = commands.add_parser("triton", help="run the Triton of the wheel alone, gRPC on 127.0.0.1:8001")
    standalone.set_defaults(command=_triton)
    for name in ("embedded_repository", "embedded_venv"):
        _add_flag(standalone, name, Path, Settings.model_fields[name].description or "")
    models = commands.add_parser("models", help="list Triton's models in a table")
    models.set_defaults(command=lambda given: uvloop.run(show_models(_settings(given))))
    _add_flag(models, "triton_url", str, "Triton's gRPC address")
    key = commands.add_parser("key", help="API keys").add_subparsers(required=True, metavar="COMMAND")
    new = key.add_parser("new", help="print a new key, and its entry for the keys file")
    new.set_defaults(command=_new_key)
    new.add_argument("id", metavar="ID", help="the name of the caller, which the log shows")
    return parser


def _add_flag(parser: argparse.ArgumentParser, name: str, annotation: Any, text: str) -> None:
    """A boolean has the forms ``--name``, ``--name false`` and ``--no-name``."""
    flag, kinds = name.replace("_", "-"), (annotation, *get_args(annotation))
    choices = next((get_args(each) for each in kinds if get_origin(each) is Literal), ())
    if bool in kinds:
        choices = ("true", "false")
        parser.add_argument(f"--no-{flag}", dest=name, action="store_const", const="false", help=argparse.SUPPRESS)
    metavar = f"{{{','.join(choices)}}}" if choices else None
    alone: dict[str, Any] = {"nargs": "?", "const": "true"} if "true" in choices else {}
    flags = [f"--{flag}", *_SHORT_FLAGS.get(name, ())]
    parser.add_argument(*flags, dest=name, metavar=metavar, help=text.replace("%", "%%"), **alone)


def _new_key(given: dict[str, Any]) -> int:
    """Prints the key to standard output, for a pipe, and the entry to standard error. Raises ConfigError."""
    from app.admission.keys import entry_of, hash_of, new_key

    key = new_key()
    entry = entry_of(given["id"], hash_of(key))
    _answer(key)
    file = os.fstat(2)
    head = "keys:\n" if stat.S_ISREG(file.st_mode) and not file.st_size else ""  # the first entry of a keys file
    print(f"{head}{entry}", end="", file=sys.stderr)  # noqa: T201 - the command's own answer
    return 0


def _check(given: dict[str, Any]) -> int:
    """Prints the report and returns the exit status. Raises Unusable or GatewayError."""
    from app.check import run_check, text_of

    credentials, triton = NO_CREDENTIALS, given["triton"]
    if given["config"] is None and triton is None:
        beside = config_beside(given["repository"])
        given["config"] = beside if os.path.lexists(beside) else None
    if triton is not None:
        credentials = check_credentials(read_settings(os.environ, {"triton_url": triton}))
    report = uvloop.run(run_check(given["repository"], given["config"], triton, credentials, given["triton_version"]))
    _answer(text_of(report, given["format"]))
    return report.status(strict=given["strict"])


def _init(given: dict[str, Any]) -> int:
    """Writes the starter, a small working model repository, or with ``--triton`` a gateway.yaml.

    Raises Unusable, EmbeddedTritonError or GatewayError.
    """
    settings = _settings({"triton_url": given["triton_url"]})
    if given["triton_url"] is not None:
        from app.check import draft

        path = (given["folder"] or Path()) / "gateway.yaml"
        _answer(uvloop.run(draft(settings.triton_url, check_credentials(settings), path)))
        return 0
    if given["folder"] is None:
        raise Unusable("Name a new folder for the models, or a running Triton: --triton HOST:8001.")
    folder, quoted = given["folder"], shlex.quote(str(given["folder"]))
    try:
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise Unusable(f"{folder} already exists and is not empty: name a new folder, nothing was written.")
        shutil.copytree(STARTER, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
    except OSError as exc:
        raise Unusable(f"{folder} cannot be written: {exc.strerror or exc}: name a new folder.") from exc
    _answer(
        f"{folder} has four models, gateway.yaml and README.md. Next:\n"
        f"  triton-gateway check {quoted}\n"
        f"  triton-gateway serve --embedded --models {quoted}"
    )
    _prepare_models(settings)
    return 0


def _triton(given: dict[str, Any]) -> int:
    from app.process.tritons import run_triton

    settings = _settings(given)
    _prepare_models(settings)
    install_requirements(settings.models_venv, settings.embedded_repository)
    uvloop.run(run_triton(settings))
    return 0


def _prepare_models(settings: Settings) -> None:
    """Creates the models' environment if the gateway's own is the default and cannot run models.

    Only the extra ``embedded`` can do this. Raises EmbeddedTritonError.
    """
    own = Path(sys.prefix)
    if settings.models_venv == own and needs_environment(own):
        logging.getLogger(__name__).info("setting up %s for the models", settings.embedded_venv)
        create_environment(settings.embedded_venv)


async def show_models(settings: Settings) -> int:
    """Prints a table: kind, readiness, inputs and outputs. Returns the exit status. Raises SettingsError."""
    from app.triton.fleet.pool import open_engine

    rows: list[tuple[str, ...]] = [("model", "kind", "ready", "inputs and outputs")]
    async with open_engine(settings.triton_url, check_credentials(settings)) as engine:
        for name, is_ready in sorted((state.name, state.ready) for state in await engine.models()):
            if not is_ready:
                rows.append((name, "", "no", ""))
                continue
            config = await engine.model_config(name)
            tensors = [
                f"{way} {spec.name} {spec.datatype} {list(spec.dims)}"
                for way, specs in (("in ", config.inputs), ("out", config.outputs))
                for spec in specs
            ]
            rows.append((name, config.backend + "\ndecoupled" * config.decoupled, "yes", "\n".join(tensors)))
    lines = [line for row in rows for line in zip_longest(*(cell.split("\n") for cell in row), fillvalue="")]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    _answer("\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
