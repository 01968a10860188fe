"""The verbs put together, and the one place where errors become a line and an exit code."""

from __future__ import annotations

import logging
import sys

import typer

from cubin_runtime.cli.bundle import bundle
from cubin_runtime.cli.cache import cache
from cubin_runtime.cli.doctor import doctor
from cubin_runtime.cli.explain import explain
from cubin_runtime.cli.fetch import fetch
from cubin_runtime.cli.list import list_kernels
from cubin_runtime.cli.run import run as run_batch
from cubin_runtime.cli.show import show
from cubin_runtime.cli.verify import verify
from cubin_runtime.errors import CubinRuntimeError

app = typer.Typer(
    help="Precompiled GPU attention kernels: what exists, which one a call gets, and whether it is sound.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,  # rich takes longer to import than all of this
    pretty_exceptions_enable=False,
)
app.command("run")(run_batch)
app.command("list")(list_kernels)
app.command("show")(show)
app.command("explain")(explain)
app.command("verify")(verify)
app.command("fetch")(fetch)
app.add_typer(bundle, name="bundle")
app.add_typer(cache, name="cache")
app.command("doctor")(doctor)


def run(arguments: list[str] | None = None) -> None:
    """Runs one command (default: the process's arguments); ends in SystemExit with its code."""
    from cubin_runtime.settings import logger, settings

    logging.basicConfig(format="%(levelname)s: %(message)s")
    logger.setLevel(settings.log_level)
    try:
        app(args=arguments, prog_name="cubin-runtime")
    except CubinRuntimeError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
