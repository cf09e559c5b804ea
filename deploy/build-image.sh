#!/bin/sh
# build-image.sh IMAGE BASE [FILE]: build with whatever of podman, buildah and docker is here and works.
# BUILD_OPTIONS in the environment: more options for it, such as --volume or --network.
set -eu
image=$1 base=$2 file=${3:-deploy/Containerfile}
cd "$(dirname "$0")/.."
# shellcheck disable=SC2086
set -- ${BUILD_OPTIONS:-} --build-arg "BASE=$base" --file "$file" --tag "$image" .
if command -v podman >/dev/null 2>&1; then exec podman build "$@"; fi
if command -v buildah >/dev/null 2>&1; then exec buildah build "$@"; fi
if command -v docker >/dev/null 2>&1; then
  docker info >/dev/null 2>&1 || { echo "make image: docker is here, but its daemon does not answer (docker info)" >&2; exit 2; }
  exec docker build "$@"
fi
echo "make image needs podman, buildah or docker, and none is in PATH; on Debian: apt-get install buildah" >&2
exit 2
