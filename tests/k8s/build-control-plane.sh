#!/bin/bash
# build-control-plane.sh [DIR]: a real Kubernetes control plane for tests, in DIR/bin.
#
# Debian's source package of Kubernetes 1.20.2 is the whole upstream tree with its dependencies, and
# Debian's Go 1.19 and etcd go with it. Nothing is installed outside DIR. Ten minutes of CPU, 2.5 GB
# while it builds, 280 MB afterwards. Needs a Debian 12 with apt-get; done once a machine.
set -euo pipefail
dir=${1:-${EMBERKV_KUBE:-${XDG_CACHE_HOME:-$HOME/.cache}/emberkv-kube}}
programs="etcd kube-apiserver kube-controller-manager kube-scheduler"

for program in $programs; do [ -x "$dir/bin/$program" ] || missing=1; done
[ "${missing:-}" ] || { echo "the control plane is in $dir/bin"; exit 0; }
command -v apt-get > /dev/null && grep -q '^VERSION_CODENAME=bookworm' /etc/os-release \
  || { echo "the control plane is built on Debian 12 only; its tests will be skipped"; exit 0; }

echo "building kube-apiserver, kube-controller-manager and kube-scheduler into $dir; ten minutes, once"
mkdir -p "$dir/bin"
work=$(mktemp -d "$dir/build.XXXXXX")
trap 'chmod -R u+w "$work"; rm -rf "$work"' EXIT
cd "$work"

# This machine's own mirror, with source packages switched on, in an apt directory of our own.
mkdir -p apt/lists/partial apt/cache/archives/partial packages go tmp gopath/src/k8s.io
mirror=$({ grep -rhoE 'https?://[^ ]*/debian/?( |$)' /etc/apt/sources.list /etc/apt/sources.list.d || true; } 2> /dev/null | head -1 | tr -d ' ')
[ "$mirror" ] || { echo "no Debian mirror is named in /etc/apt" >&2; exit 1; }
for kind in deb deb-src; do
  echo "$kind [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] $mirror bookworm main"
done > apt/list
apt() {
  apt-get -q -o APT::Sandbox::User=root -o Dir::Etc::sourcelist="$work/apt/list" -o Dir::Etc::sourceparts=/dev/null \
    -o Dir::State::lists="$work/apt/lists" -o Dir::Cache="$work/apt/cache" "$@"
}
cd packages
apt update > /dev/null
apt source --download-only kubernetes > /dev/null
apt download golang-1.19-go golang-1.19-src etcd-server > /dev/null
for package in golang*.deb; do dpkg-deb -x "$package" "$work/go"; done
dpkg-deb -x etcd-server*.deb "$work/etcd"
cp "$work/etcd/usr/bin/etcd" "$dir/bin/"
tar -xf kubernetes_*.orig.tar.gz -C "$work/gopath/src/k8s.io"
mv "$work"/gopath/src/k8s.io/kubernetes-* "$work/gopath/src/k8s.io/kubernetes"

export GOROOT=$work/go/usr/lib/go-1.19 GOPATH=$work/gopath GOCACHE=$work/cache GOTMPDIR=$work/tmp
export GO111MODULE=off CGO_ENABLED=0 GOFLAGS='' PATH=$GOROOT/bin:$PATH
cd "$GOPATH/src/k8s.io/kubernetes"

# The tarball lacks one generated file; its generator is in the tree.
go build -o "$work/openapi-gen" ./vendor/k8s.io/kube-openapi/cmd/openapi-gen
marked=$(grep -rl --include='*.go' '+k8s:openapi-gen=' pkg cmd plugin staging/src/k8s.io \
  | grep -vE 'code-generator|sample-apiserver|_test.go|kube-openapi|/generated/' \
  | sed 's#^staging/src/#vendor/#' | xargs -n1 dirname | LC_ALL=C sort -u \
  | sed 's#^#k8s.io/kubernetes/#' | paste -sd,)
"$work/openapi-gen" --logtostderr -i "$marked" -p k8s.io/kubernetes/pkg/generated/openapi \
  -O zz_generated.openapi -h vendor/k8s.io/code-generator/hack/boilerplate.go.txt -r "$work/violations"

flags='-s -w'
for package in component-base/version client-go/pkg/version; do
  for fact in gitVersion=v1.20.2 gitMajor=1 gitMinor=20; do
    flags="$flags -X k8s.io/kubernetes/vendor/k8s.io/$package.$fact"
  done
done
for program in kube-apiserver kube-controller-manager kube-scheduler; do
  echo "building $program"
  nice go build -p 2 -ldflags "$flags" -o "$dir/bin/$program" "./cmd/$program"
done
