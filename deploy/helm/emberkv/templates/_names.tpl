{{- define "emberkv.name" -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- if contains $name .Release.Name }}{{ .Release.Name | trunc 40 | trimSuffix "-" }}{{ else }}{{ printf "%s-%s" .Release.Name $name | trunc 40 | trimSuffix "-" }}{{ end -}}
{{- end -}}

{{/* Labels that select: (list root component) */}}
{{- define "emberkv.selector" -}}
{{- $root := index . 0 -}}
app.kubernetes.io/name: {{ $root.Chart.Name }}
app.kubernetes.io/instance: {{ $root.Release.Name }}
app.kubernetes.io/component: {{ index . 1 }}
{{- end -}}

{{/* The daemons' pods, as a label selector in one line. */}}
{{- define "emberkv.storeSelector" -}}
{{- range $key, $value := include "emberkv.selector" (list . "store") | fromYaml }}{{ if ne $key "app.kubernetes.io/component" }}{{ $key }}={{ $value }},{{ end }}{{ end }}app.kubernetes.io/component=store
{{- end -}}

{{- define "emberkv.labels" -}}
{{- $root := index . 0 -}}
{{ include "emberkv.selector" . }}
app.kubernetes.io/version: {{ $root.Chart.AppVersion | quote }}
app.kubernetes.io/part-of: emberkv
{{- end -}}

{{- define "emberkv.image" -}}
{{- $image := .Values.image -}}
{{ $image.repository }}{{ if $image.digest }}@{{ $image.digest }}{{ else }}:{{ default .Chart.AppVersion $image.tag }}{{ end }}
{{- end -}}

{{- define "emberkv.storeName" -}}{{ include "emberkv.name" . }}-store{{- end -}}

{{/* Annotations of pods with an emptyDir that may go with them, which cluster-autoscaler would else
not evict: (list theirs volumes) */}}
{{- define "emberkv.podAnnotations" -}}
{{- $own := dict "cluster-autoscaler.kubernetes.io/safe-to-evict-local-volumes" (index . 1) -}}
{{- toYaml (merge (deepCopy (index . 0)) $own) -}}
{{- end -}}

{{/* What all containers of ours have in common. */}}
{{- define "emberkv.containerSecurity" -}}
allowPrivilegeEscalation: false
privileged: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end -}}

{{- define "emberkv.podSecurity" -}}
runAsNonRoot: true
runAsUser: {{ .Values.user.uid }}
runAsGroup: {{ .Values.user.gid }}
{{- if or .Values.tls.secret .Values.store.operatorTokenSecret .Values.store.volumes .Values.router.volumes .Values.index.volumes }}
fsGroup: {{ .Values.user.gid }}
fsGroupChangePolicy: OnRootMismatch
{{- end }}
seccompProfile: {type: RuntimeDefault}
{{- end -}}

{{- define "emberkv.priorityClass" -}}
{{- if .Values.store.priorityClassName }}{{ .Values.store.priorityClassName }}{{ else if .Values.priorityClass.create }}{{ include "emberkv.name" . }}-{{ .Release.Namespace }}{{ end -}}
{{- end -}}

{{/* What the pod has from a value of its own, the file may not say otherwise: (list part values keys) */}}
{{- define "emberkv.refuseOwned" -}}
{{- $part := index . 0 -}}
{{- $config := index . 1 -}}
{{- range $key, $instead := index . 2 -}}
{{- $words := splitList "." $key -}}
{{- if hasKey (default dict (get $config (first $words))) (last $words) -}}
{{- fail (printf "%s.config.%s: set %s instead, from which the pod takes it too" $part $key $instead) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* 5353: where OpenShift's DNS pods listen. */}}
{{- define "emberkv.dnsPorts" -}}
{{- range $port := list 53 5353 }}
{{- range $protocol := list "UDP" "TCP" }}
- {protocol: {{ $protocol }}, port: {{ $port }}}
{{- end }}
{{- end }}
{{- end -}}

{{/* The port of tcp://host:port in section events of the daemons' file; nothing for other kinds. */}}
{{- define "emberkv.eventPorts" -}}
{{- range $key := list "zmq_endpoint" "zmq_replay_endpoint" -}}
{{- $endpoint := dig "events" $key "" $.Values.store.config | toString -}}
{{- if hasPrefix "tcp://" $endpoint }}
{{- with regexFind "[0-9]+$" $endpoint }}
- {protocol: TCP, port: {{ . }}}
{{- end }}
{{- end }}
{{- end }}
{{- end -}}

{{/* Directories of the node: YAML list of name, hostPath, mountPath. */}}
{{- define "emberkv.hostPaths" -}}
{{- $store := .Values.store -}}
- {name: pool, hostPath: {{ $store.pool.hostPath }}, mountPath: /pool}
- {name: socket, hostPath: {{ $store.socketHostPath }}, mountPath: /run/emberkv}
- {name: data, hostPath: {{ $store.dataHostPath }}, mountPath: /data}
{{- if $store.ssd.capacityMi }}
{{- range $number, $path := $store.ssd.hostPaths }}
- {name: ssd-{{ $number }}, hostPath: {{ $path }}, mountPath: /ssd/{{ $number }}}
{{- end }}
{{- end }}
{{- end -}}

{{/* Of sections daemon and index alike. */}}
{{- define "emberkv.tlsKeys" -}}
tls_cert_file: /tls/tls.crt
tls_key_file: /tls/tls.key
tls_ca_file: /tls/ca.crt
tls_server_name: {{ .Values.tls.serverName | quote }}
{{- end -}}

{{- define "emberkv.tlsMount" -}}
{{- if .Values.tls.secret }}
- {name: tls, mountPath: /tls, readOnly: true}
{{- end }}
{{- end -}}

{{- define "emberkv.tlsVolume" -}}
{{- if .Values.tls.secret }}
- name: tls
  secret: {secretName: {{ .Values.tls.secret }}, defaultMode: 0400}
{{- end }}
{{- end -}}

{{- define "emberkv.redisName" -}}{{ include "emberkv.name" . }}-redis{{- end -}}

{{- define "emberkv.redisEnvironment" -}}
- name: POD_IP
  valueFrom: {fieldRef: {fieldPath: status.podIP}}
- name: POD_NAME
  valueFrom: {fieldRef: {fieldPath: metadata.name}}
- {name: NODES, value: {{ int64 .Values.redis.server.replicas | quote }}}
{{- if .Values.redis.passwordSecret }}
- name: REDISCLI_AUTH
  valueFrom: {secretKeyRef: {name: {{ .Values.redis.passwordSecret }}, key: password}}
{{- end }}
{{- end -}}

{{- define "emberkv.redisUrl" -}}
{{- if .Values.redis.url }}{{ .Values.redis.url }}{{ else if .Values.redis.server.enabled }}redis://{{ include "emberkv.redisName" . }}.{{ .Release.Namespace }}.svc:{{ int64 .Values.redis.server.port }}{{ end -}}
{{- end -}}

{{/* What routers and indexes have in their environment. */}}
{{- define "emberkv.indexEnvironment" -}}
- {name: NUMBA_CACHE_DIR, value: /tmp/numba}
{{- if .Values.redis.passwordSecret }}
- name: EMBERKV_INDEX__REDIS_PASSWORD
  valueFrom: {secretKeyRef: {name: {{ .Values.redis.passwordSecret }}, key: password}}
{{- end }}
{{- end -}}

{{/* The configuration files. What the user writes in `config` wins. */}}
{{- define "emberkv.storeConfig" -}}
{{- $store := .Values.store -}}
{{- include "emberkv.refuseOwned" (list "store" $store.config (dict
  "daemon.grpc_port" "store.ports.grpc" "daemon.metrics_port" "store.ports.metrics"
  "daemon.transport_port" "store.ports.transfer" "daemon.drain_seconds" "store.drainSeconds")) -}}
{{- $allowed := list -}}
{{- range $store.allowedUids }}{{ $allowed = append $allowed (int64 .) }}{{ end -}}
{{- $daemon := dict
  "socket_path" "/run/emberkv/daemon.sock"
  "data_dir" "/data"
  "allowed_uids" $allowed
  "grpc_host" "0.0.0.0"
  "grpc_port" (int64 $store.ports.grpc)
  "transport_port" (int64 $store.ports.transfer)
  "metrics_host" "0.0.0.0"
  "metrics_port" (int64 $store.ports.metrics)
  "index_address" (printf "%s-index.%s.svc:%d" (include "emberkv.name" .) .Release.Namespace (int64 .Values.index.ports.grpc))
  "drain_seconds" $store.drainSeconds
  "log_format" "json" -}}
{{- if .Values.tls.secret }}{{ $daemon = merge $daemon (include "emberkv.tlsKeys" . | fromYaml) }}{{ end -}}
{{- if $store.operatorTokenSecret }}{{ $_ := set $daemon "operator_token_file" "/token/token" }}{{ end -}}
{{- $mib := int64 1048576 -}}
{{- $dram := dict "path" "/pool/pool" "capacity_bytes" (mul $mib (int64 $store.pool.capacityMi)) -}}
{{- $ssd := dict "capacity_bytes" (mul $mib (int64 $store.ssd.capacityMi)) -}}
{{- if $store.ssd.capacityMi -}}
{{- if eq (len $store.ssd.hostPaths) 1 -}}
{{- $_ := set $ssd "path" "/ssd/0" -}}
{{- else -}}
{{- $paths := list -}}
{{- range $number, $path := $store.ssd.hostPaths }}{{ $paths = append $paths (printf "/ssd/%d" $number) }}{{ end -}}
{{- $_ := set $ssd "paths" $paths -}}
{{- end -}}
{{- end -}}
{{- toYaml (mergeOverwrite (dict "daemon" $daemon "dram" $dram "ssd" $ssd) (deepCopy $store.config)) -}}
{{- end -}}

{{- define "emberkv.indexSection" -}}
host: 0.0.0.0
port: {{ int64 .Values.index.ports.grpc }}
metrics_port: {{ int64 .Values.index.ports.metrics }}
{{- if eq .Values.discovery.mode "kubernetes" }}
kubernetes:
  namespace: {{ .Release.Namespace }}
  daemons: {{ include "emberkv.storeSelector" . | quote }}
  {{- with .Values.discovery.engineSelector }}
  engines: {{ . | quote }}
  {{- end }}
  {{- with .Values.discovery.engineNamespaces }}
  engine_namespaces: {{ toJson . }}
  {{- end }}
  node_leases: {{ .Values.discovery.nodeLeases }}
{{- else }}
nodes: ["dns:///{{ include "emberkv.storeName" . }}.{{ .Release.Namespace }}.svc:{{ int64 .Values.store.ports.grpc }}"]
{{- end }}
log_format: json
{{- if .Values.tls.secret }}
{{ include "emberkv.tlsKeys" . }}
{{- end }}
{{- with include "emberkv.redisUrl" . }}
redis_url: {{ . | quote }}
{{- end }}
{{- end -}}

{{- define "emberkv.routerConfig" -}}
{{- include "emberkv.refuseOwned" (list "router" .Values.router.config (dict
  "router.port" "router.port" "router.ext_proc_port" "router.extProcPort"
  "router.drain_seconds" "router.drainSeconds" "index.port" "index.ports.grpc")) -}}
{{- $router := dict "host" "0.0.0.0" "port" (int64 .Values.router.port) "drain_seconds" .Values.router.drainSeconds "log_format" "json" -}}
{{- with .Values.router.extProcPort }}{{ $_ := set $router "ext_proc_port" (int64 .) }}{{ end -}}
{{- $index := include "emberkv.indexSection" . | fromYaml -}}
{{- toYaml (mergeOverwrite (dict "router" $router "index" $index) (deepCopy .Values.router.config)) -}}
{{- end -}}

{{- define "emberkv.indexConfig" -}}
{{- include "emberkv.refuseOwned" (list "index" .Values.index.config (dict
  "index.port" "index.ports.grpc" "index.metrics_port" "index.ports.metrics")) -}}
{{- $index := include "emberkv.indexSection" . | fromYaml -}}
{{- toYaml (mergeOverwrite (dict "index" $index) (deepCopy .Values.index.config)) -}}
{{- end -}}
