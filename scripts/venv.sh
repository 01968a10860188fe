# Sourced by the scripts beside it and by .ci/run: `install "[extras]"` installs the checkout and its extras into
# .venv, which is made where it is missing, and activates it.
#   PYTHON   makes .venv (default: python3); 3.10 or newer
#   TORCH    what to install as torch (default: the version that the tests are run with)

install() {
  # `activate` is written last, so a .venv without it was not finished.
  [ -f .venv/bin/activate ] || "${PYTHON:-python3}" -m venv .venv
  . .venv/bin/activate
  local installed=".venv/installed$1"
  if [ ! "$installed" -nt pyproject.toml ]; then
    echo "installing into .venv; the first time, this takes minutes" >&2
    python -m pip install --quiet --disable-pip-version-check "${TORCH:-torch==2.13.0}" -e ".$1"
    touch "$installed"
  fi
}
