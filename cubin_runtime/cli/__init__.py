"""The command line. Data goes to stdout, everything else to stderr.

Exit codes: 0 ok, 1 failed, 2 usage, 3 no kernel, 4 integrity, 5 offline.
"""

import gc


def main() -> None:
    """Entry point of the `cubin-runtime` command; always ends in SystemExit."""
    from cubin_runtime.cli.app import run

    try:
        run()
    finally:
        gc.freeze()  # else the interpreter goes through all modules for garbage before it ends
