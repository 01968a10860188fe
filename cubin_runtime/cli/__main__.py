"""`python -m cubin_runtime.cli`, for where the installed command is not on PATH."""

from cubin_runtime.cli import main

main()
