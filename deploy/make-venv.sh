#!/bin/sh
# make-venv.sh PYTHON DIR: a virtual environment with pip, also on a Debian without python3-venv.
set -eu
python=$1 dir=$2
[ -x "$dir/bin/python" ] && "$dir/bin/python" -m pip --version >/dev/null 2>&1 && exit 0
rm -rf "$dir"
said=$("$python" -m venv "$dir" 2>&1) && exit 0
rm -rf "$dir"
package="python$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')-venv"
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then
  echo "installing $package, which $python -m venv needs"
  set -- -o Acquire::Retries=5 -o DPkg::Lock::Timeout=300
  apt-get "$@" update -qq || echo "the lists of packages may be old" >&2
  DEBIAN_FRONTEND=noninteractive apt-get "$@" install -y -qq "$package" >/dev/null
  exec "$python" -m venv "$dir"
fi
echo "$said" >&2
echo "$python cannot make a virtual environment in $dir; on Debian: sudo apt-get install $package" >&2
exit 1
