#!/bin/sh
# render-kustomize.sh HELM [DIR]: write what kustomize needs from the chart, which is its only source,
# and the chart's alert rules as a Prometheus without the operator reads them (DIR/prometheus).
# Without DIR into this tree; tests render into another DIR and compare.
set -eu
helm=$1
here=$(cd "$(dirname "$0")" && pwd)
out=${2:-$here/kustomize}
head='# Generated from deploy/helm/emberkv by deploy/render-kustomize.sh. Do not edit.'
rules=${2:-$here}/prometheus
mkdir -p "$rules" "$out/base" "$out/components/monitoring" "$out/components/redis" "$out/components/vllm"

render() { # FILE, then options of helm template
  file=$1
  shift
  text=$("$helm" template emberkv "$here/helm/emberkv" --namespace emberkv "$@")
  { echo "$head"; printf '%s\n' "$text" | grep -v '^# Source: '; } > "$file"
}

render "$out/base/emberkv.yaml"
render "$out/components/monitoring/monitoring.yaml" --set monitoring.enabled=true --show-only templates/monitoring.yaml
render "$out/components/redis/redis.yaml" --set redis.server.enabled=true --set redis.server.replicas=3 --show-only templates/redis.yaml --show-only templates/network-redis.yaml
render "$out/components/vllm/vllm.yaml" --set vllm.enabled=true --show-only templates/vllm.yaml

{ echo "$head"
  echo '# What to do at each: docs/alerts.md. EmberKVDaemonNotScraped asks for the job emberkv-store.'
  awk '/^kind: PrometheusRule/ {rule = 1} /^---/ {rule = body = 0} body {sub("^  ", ""); print}
       rule && /^spec:/ {body = 1}' "$out/components/monitoring/monitoring.yaml" \
    | sed -e 's/namespace="emberkv", //' -e '/^ *#/d'
} > "$rules/emberkv.rules.yaml"
