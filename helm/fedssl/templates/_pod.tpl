{{/* Settings of all pods. Arguments: root, component, values. */}}
{{- define "fedssl.podSettings" -}}
automountServiceAccountToken: false
enableServiceLinks: false
serviceAccountName: {{ include "fedssl.serviceAccount" . | quote }}
terminationGracePeriodSeconds: {{ int64 .values.terminationGracePeriodSeconds }}
securityContext:
  {{- toYaml (mergeOverwrite (deepCopy .root.Values.podSecurityContext) .values.podSecurityContext) | nindent 2 }}
{{- with .root.Values.image.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . | quote }}
  {{- end }}
{{- end }}
{{- with .values.runtimeClassName }}
runtimeClassName: {{ . | quote }}
{{- end }}
{{- with .values.priorityClassName }}
priorityClassName: {{ . | quote }}
{{- end }}
{{- with fromYaml (include "fedssl.affinity" .) }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- range $key := list "nodeSelector" "tolerations" "topologySpreadConstraints" }}
{{- with index $.values $key }}
{{ $key }}:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}
{{- end }}

{{/* Not empty if the pods of the coordinator share a volume that only one node can mount. */}}
{{- define "fedssl.runsOnOneNode" -}}
{{- if and (eq .Values.store.type "filesystem") (not (has "ReadWriteMany" .Values.store.accessModes)) }}true{{ end }}
{{- end }}

{{/* A component's affinity. */}}
{{- define "fedssl.affinity" -}}
{{- $affinity := deepCopy .values.affinity }}
{{- $components := include "fedssl.coordinatorComponents" . | fromYamlArray }}
{{- if and (has .component $components) (include "fedssl.runsOnOneNode" .root) }}
{{- $labels := dict "app.kubernetes.io/name" (include "fedssl.name" .root) "app.kubernetes.io/instance" .root.Release.Name }}
{{- $among := dict "key" "app.kubernetes.io/component" "operator" "In" "values" $components }}
{{- $selector := dict "matchLabels" $labels "matchExpressions" (list $among) }}
{{- $together := dict "topologyKey" "kubernetes.io/hostname" "labelSelector" $selector }}
{{- $pods := default (dict) $affinity.podAffinity }}
{{- $required := append (default (list) $pods.requiredDuringSchedulingIgnoredDuringExecution) $together }}
{{- $_ := set $affinity "podAffinity" (set $pods "requiredDuringSchedulingIgnoredDuringExecution" $required) }}
{{- end }}
{{- toYaml $affinity }}
{{- end }}

{{/* What values add to a component's container and pod. Arguments of "extra": root, component, values; the key. */}}
{{- define "fedssl.extraEnvFrom" -}}
{{- with .values.extraEnvFrom }}
envFrom:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}
{{- define "fedssl.extra" -}}
{{- with index (first .).values (last .) }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- define "fedssl.tracingEnv" -}}
{{- with .Values.tracing.endpoint }}
- name: OTEL_EXPORTER_OTLP_ENDPOINT
  value: {{ . | quote }}
{{- end }}
{{- end }}

{{/* Without version labels: a new chart version that does not change a pod must not restart it. */}}
{{- define "fedssl.podMetadata" -}}
labels:
  {{- include "fedssl.selectorLabels" . | nindent 2 }}
  {{- with .values.podLabels }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- with merge (dict) (default (dict) .annotations) .values.podAnnotations }}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{- define "fedssl.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: { drop: [ALL] }
{{- end }}

{{- define "fedssl.resources" -}}
{{- $resources := deepCopy .values.resources }}
{{- if gt (int .values.gpu.count) 0 }}
{{- $gpu := dict .values.gpu.resource (int .values.gpu.count) }}
{{- $_ := set $resources "limits" (merge $gpu (default (dict) $resources.limits)) }}
{{- end }}
{{- toYaml $resources }}
{{- end }}

{{/* A Deployment with GPUs must not wait for a spare GPU: stop the old pods before starting new ones. */}}
{{- define "fedssl.strategy" -}}
{{- if gt (int .values.gpu.count) 0 }}
type: Recreate
{{- else }}
type: RollingUpdate
rollingUpdate: { maxSurge: 1, maxUnavailable: 0 }
{{- end }}
{{- end }}

{{/* For a process without a port, which touches a file while it is alive. */}}
{{- define "fedssl.livenessProbes" -}}
startupProbe:
  exec: { command: [python, -m, fedssl.liveness] }
  periodSeconds: 5
  timeoutSeconds: 10
  failureThreshold: 60
livenessProbe:
  exec: { command: [python, -m, fedssl.liveness] }
  periodSeconds: 30
  timeoutSeconds: 10
  failureThreshold: 3
{{- end }}

{{/* Metrics on a separate port, with podMonitor.enabled. Arguments: root; for the environment also prefix. */}}
{{- define "fedssl.metricsPort" -}}
{{- if .root.Values.podMonitor.enabled }}
ports: [{ name: metrics, containerPort: {{ .root.Values.podMonitor.port }}, protocol: TCP }]
{{- end }}
{{- end }}
{{- define "fedssl.metricsEnv" -}}
{{- if .root.Values.podMonitor.enabled }}
- name: {{ .prefix }}METRICS_PORT
  value: {{ .root.Values.podMonitor.port | quote }}
- name: {{ .prefix }}METRICS_HOST
  value: 0.0.0.0
{{- end }}
{{- end }}

{{/* The environment of the coordinator's processes. */}}
{{- define "fedssl.coordinatorEnv" -}}
- name: FEDSSL_DATABASE_URL
  valueFrom:
    secretKeyRef:
      {{- if include "fedssl.bundledPostgresql" .root }}
      name: {{ include "fedssl.fullname" .root }}-postgresql
      key: url
      {{- else }}
      name: {{ .root.Values.postgresql.external.existingSecret | quote }}
      key: {{ .root.Values.postgresql.external.key | quote }}
      {{- end }}
{{- if and (not (include "fedssl.bundledPostgresql" .root)) .root.Values.postgresql.external.directKey }}
- name: FEDSSL_DATABASE_DIRECT_URL
  valueFrom:
    secretKeyRef:
      name: {{ .root.Values.postgresql.external.existingSecret | quote }}
      key: {{ .root.Values.postgresql.external.directKey | quote }}
{{- end }}
- name: FEDSSL_REDIS_URL
  valueFrom:
    secretKeyRef:
      {{- if include "fedssl.bundledRedis" .root }}
      name: {{ include "fedssl.fullname" .root }}-redis
      key: url
      {{- else }}
      name: {{ .root.Values.redis.external.existingSecret | quote }}
      key: {{ .root.Values.redis.external.key | quote }}
      {{- end }}
{{- if eq .root.Values.store.type "s3" }}
{{ include "fedssl.storeEnv" .root.Values.store.s3 }}
{{- end }}
{{- if .root.Values.postgresql.external.caSecret.name }}
- { name: PGSSLROOTCERT, value: /authorities/postgresql.crt }
- { name: PGSSLMODE, value: verify-full }
{{- end }}
{{- if .root.Values.redis.external.caSecret.name }}
- { name: FEDSSL_REDIS_CA_FILE, value: /authorities/redis.crt }
{{- end }}
{{- if .root.Values.store.s3.caSecret.name }}
- { name: AWS_CA_BUNDLE, value: /authorities/s3.crt }
{{- end }}
{{- include "fedssl.tracingEnv" .root }}
{{- with .values.extraEnv }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/* Sign-in at a provider. Argument: api.oidc. */}}
{{- define "fedssl.oidcEnv" -}}
- { name: FEDSSL_OIDC_ISSUER, value: {{ .issuer | quote }} }
- { name: FEDSSL_OIDC_CLIENT_ID, value: {{ .clientId | quote }} }
- { name: FEDSSL_OIDC_ROLES, value: {{ toJson .roles | quote }} }
- { name: FEDSSL_OIDC_ROLES_CLAIM, value: {{ .rolesClaim | quote }} }
- { name: FEDSSL_OIDC_SCOPES, value: {{ .scopes | quote }} }
{{- if .clientSecret.name }}
- name: FEDSSL_OIDC_CLIENT_SECRET
  valueFrom: { secretKeyRef: { name: {{ .clientSecret.name | quote }}, key: {{ .clientSecret.key | quote }} } }
{{- end }}
{{- if .caSecret.name }}
- { name: FEDSSL_OIDC_CA_FILE, value: /authorities/oidc.crt }
{{- end }}
{{- end }}

{{/* Certificates of the authorities of external servers. Both are empty if there are none. */}}
{{- define "fedssl.authorities" -}}
{{- $secrets := dict "postgresql" .root.Values.postgresql.external.caSecret "redis" .root.Values.redis.external.caSecret "s3" .root.Values.store.s3.caSecret }}
{{- if eq .component "api" }}{{ $_ := set $secrets "oidc" .root.Values.api.oidc.caSecret }}{{ end }}
{{- range $server, $secret := $secrets }}
{{- if $secret.name }}
- secret:
    name: {{ $secret.name | quote }}
    items: [{ key: {{ $secret.key | quote }}, path: {{ $server }}.crt }]
{{- end }}
{{- end }}
{{- end }}
{{- define "fedssl.authoritiesMount" -}}
{{- if include "fedssl.authorities" . }}
- { name: authorities, mountPath: /authorities, readOnly: true }
{{- end }}
{{- end }}

{{/* The URL of the bucket, and the local folder for copies. Argument: store.s3. */}}
{{- define "fedssl.storeEnv" -}}
{{- $options := list }}
{{- range $name, $value := dict "endpoint" .endpoint "public_endpoint" .publicEndpoint "region" .region }}
{{- if $value }}{{ $options = append $options (printf "%s=%s" $name $value) }}{{ end }}
{{- end -}}
- { name: FEDSSL_STORE_URL, value: {{ printf "s3://%s/%s%s%s" .bucket .prefix (ternary "?" "" (gt (len $options) 0)) (join "&" $options) | quote }} }
- { name: FEDSSL_STORE_CACHE_PATH, value: /var/lib/fedssl }
- { name: FEDSSL_STORE_CACHE_BYTES, value: {{ include "fedssl.halfOf" .cacheSize | quote }} }
- { name: FEDSSL_STORE_DIRECT, value: {{ .direct | quote }} }
{{- with .existingSecret }}
- name: FEDSSL_S3_ACCESS_KEY_ID
  valueFrom: { secretKeyRef: { name: {{ . | quote }}, key: access-key-id } }
- name: FEDSSL_S3_SECRET_ACCESS_KEY
  valueFrom: { secretKeyRef: { name: {{ . | quote }}, key: secret-access-key } }
{{- end }}
{{- end }}

{{/* Half of a quantity in Mi, Gi or Ti, in bytes. */}}
{{- define "fedssl.halfOf" -}}
{{- $units := dict "Mi" 1048576 "Gi" 1073741824 "Ti" 1099511627776 }}
{{- $unit := regexFind "[MGT]i$" . }}
{{- if not $unit }}{{ fail (printf "store.s3.cacheSize must be in Mi, Gi or Ti, not %s" .) }}{{ end }}
{{- int64 (mulf (trimSuffix $unit .) (index $units $unit) 0.5) }}
{{- end }}

{{/* One container of the coordinator. Arguments: root, component, values, args; env and more are added by the caller. */}}
{{- define "fedssl.coordinatorContainer" -}}
name: {{ .component }}
image: {{ include "fedssl.image" . }}
imagePullPolicy: {{ .root.Values.image.pullPolicy }}
args: {{ toJson .args }}
envFrom:
  - configMapRef: { name: {{ include "fedssl.fullname" .root }}-settings }
  {{- with .values.extraEnvFrom }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
resources:
  {{- include "fedssl.resources" . | nindent 2 }}
securityContext:
  {{- include "fedssl.containerSecurity" . | nindent 2 }}
volumeMounts:
  - { name: tmp, mountPath: /tmp }
  - { name: store, mountPath: /var/lib/fedssl }
  {{- include "fedssl.authoritiesMount" . | nindent 2 }}
  {{- include "fedssl.extra" (list . "extraVolumeMounts") | nindent 2 }}
{{- end }}

{{- define "fedssl.coordinatorVolumes" -}}
- name: tmp
  emptyDir: { sizeLimit: 1Gi }
- name: store
  {{- if eq .root.Values.store.type "s3" }}
  emptyDir: { sizeLimit: {{ .root.Values.store.s3.cacheSize }} }
  {{- else }}
  persistentVolumeClaim: { claimName: {{ include "fedssl.storeClaim" .root | quote }} }
  {{- end }}
{{- with include "fedssl.authorities" . }}
- name: authorities
  projected:
    sources:
      {{- . | nindent 6 }}
{{- end }}
{{- include "fedssl.extra" (list . "extraVolumes") }}
{{- end }}

{{/* No process starts before the tables exist, in whatever order Kubernetes starts the pods. */}}
{{- define "fedssl.awaitMigrations" -}}
- name: await-migrations
  image: {{ include "fedssl.image" . }}
  imagePullPolicy: {{ .root.Values.image.pullPolicy }}
  args: [migrate, --wait, {{ int64 .root.Values.coordinator.migrationWaitSeconds | quote }}]
  {{- include "fedssl.extraEnvFrom" . | nindent 2 }}
  env:
    {{- include "fedssl.coordinatorEnv" . | nindent 4 }}
  resources:
    requests: { cpu: 50m, memory: 128Mi }
    limits: { memory: 512Mi }
  securityContext:
    {{- include "fedssl.containerSecurity" . | nindent 4 }}
  volumeMounts:
    - { name: tmp, mountPath: /tmp }
    {{- include "fedssl.authoritiesMount" . | nindent 4 }}
    {{- include "fedssl.extra" (list . "extraVolumeMounts") | nindent 4 }}
{{- end }}

{{- define "fedssl.settingsChecksum" -}}
checksum/settings: {{ toJson .Values.coordinator.settings | sha256sum }}
{{- end }}
