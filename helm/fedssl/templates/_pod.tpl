{{/* Settings of all pods. Arguments: root, component, values; uid if it differs from the project's own. */}}
{{- define "fedssl.podSettings" -}}
automountServiceAccountToken: false
enableServiceLinks: false
serviceAccountName: {{ include "fedssl.serviceAccount" . }}
terminationGracePeriodSeconds: {{ .values.terminationGracePeriodSeconds }}
securityContext:
  runAsNonRoot: true
  runAsUser: {{ default 10001 .uid }}
  runAsGroup: {{ default 10001 .uid }}
  fsGroup: {{ default 10001 .uid }}
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile: { type: RuntimeDefault }
{{- with .root.Values.image.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
{{- with .values.runtimeClassName }}
runtimeClassName: {{ . }}
{{- end }}
{{- with .values.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- range $key := list "nodeSelector" "tolerations" "affinity" "topologySpreadConstraints" }}
{{- with index $.values $key }}
{{ $key }}:
  {{- toYaml . | nindent 2 }}
{{- end }}
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
      name: {{ .root.Values.postgresql.external.existingSecret }}
      key: {{ .root.Values.postgresql.external.key }}
      {{- end }}
{{- if and (not (include "fedssl.bundledPostgresql" .root)) .root.Values.postgresql.external.directKey }}
- name: FEDSSL_DATABASE_DIRECT_URL
  valueFrom:
    secretKeyRef:
      name: {{ .root.Values.postgresql.external.existingSecret }}
      key: {{ .root.Values.postgresql.external.directKey }}
{{- end }}
- name: FEDSSL_REDIS_URL
  valueFrom:
    secretKeyRef:
      {{- if include "fedssl.bundledRedis" .root }}
      name: {{ include "fedssl.fullname" .root }}-redis
      key: url
      {{- else }}
      name: {{ .root.Values.redis.external.existingSecret }}
      key: {{ .root.Values.redis.external.key }}
      {{- end }}
{{- if eq .root.Values.store.type "s3" }}
{{ include "fedssl.storeEnv" .root.Values.store.s3 }}
{{- end }}
{{- with .values.extraEnv }}
{{ toYaml . }}
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
  valueFrom: { secretKeyRef: { name: {{ . }}, key: access-key-id } }
- name: FEDSSL_S3_SECRET_ACCESS_KEY
  valueFrom: { secretKeyRef: { name: {{ . }}, key: secret-access-key } }
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
resources:
  {{- include "fedssl.resources" . | nindent 2 }}
securityContext:
  {{- include "fedssl.containerSecurity" . | nindent 2 }}
volumeMounts:
  - { name: tmp, mountPath: /tmp }
  - { name: store, mountPath: /var/lib/fedssl }
{{- end }}

{{- define "fedssl.coordinatorVolumes" -}}
- name: tmp
  emptyDir: { sizeLimit: 1Gi }
- name: store
  {{- if eq .root.Values.store.type "s3" }}
  emptyDir: { sizeLimit: {{ .root.Values.store.s3.cacheSize }} }
  {{- else }}
  persistentVolumeClaim: { claimName: {{ include "fedssl.storeClaim" .root }} }
  {{- end }}
{{- end }}

{{/* No process starts before the tables exist, in whatever order Kubernetes starts the pods. */}}
{{- define "fedssl.awaitMigrations" -}}
- name: await-migrations
  image: {{ include "fedssl.image" . }}
  imagePullPolicy: {{ .root.Values.image.pullPolicy }}
  args: [migrate, --wait, {{ .root.Values.coordinator.migrationWaitSeconds | quote }}]
  env:
    {{- include "fedssl.coordinatorEnv" . | nindent 4 }}
  resources:
    requests: { cpu: 50m, memory: 128Mi }
    limits: { memory: 512Mi }
  securityContext:
    {{- include "fedssl.containerSecurity" . | nindent 4 }}
  volumeMounts:
    - { name: tmp, mountPath: /tmp }
{{- end }}

{{- define "fedssl.settingsChecksum" -}}
checksum/settings: {{ toJson .Values.coordinator.settings | sha256sum }}
{{- end }}
