{{/* Values that would render but not work. The schema has already refused unknown keys. */}}

{{/* Keys that have moved, or that other charts use; the schema accepts them, so that this message names the right key. */}}
{{- define "fedssl.removedKeys" -}}
replicaCount: api.replicas
resources: resources of a component, for example api.resources
service: api.service
ingress: api.ingress
autoscaling: api.autoscaling
serviceMonitor: api.serviceMonitor
persistence: store
workers: worker.clients
postgres: postgresql
{{- end }}

{{- define "fedssl.validate" -}}
{{- range $old, $new := fromYaml (include "fedssl.removedKeys" .) }}
{{- if hasKey $.Values $old }}
{{- fail (printf "%s is not a value of this chart: use %s" $old $new) }}
{{- end }}
{{- end }}
{{- if and .Values.api.ingress.enabled (not .Values.api.ingress.host) }}
{{- fail "api.ingress.enabled needs api.ingress.host, the host name that workers use for the API" }}
{{- end }}
{{- if and .Values.api.ingress.enabled (not .Values.api.trustedProxies) }}
{{- fail "api.ingress.enabled needs api.trustedProxies, the addresses or networks of the Ingress controller's pods: without it the limits count all callers as one, and a flood from one of them blocks the others" }}
{{- end }}
{{- if and .Values.api.serviceMonitor.enabled (not .Values.api.serviceMonitor.tokenSecret.name) }}
{{- fail "api.serviceMonitor.enabled needs api.serviceMonitor.tokenSecret.name, a Secret with a viewer's token: /metrics requires one" }}
{{- end }}
{{- if and (not .Values.coordinator.enabled) (not .Values.worker.clients) }}
{{- fail "nothing to install: coordinator.enabled is false and worker.clients is empty" }}
{{- end }}
{{- with .Values.postgresql.external }}
{{- if and .directKey (not .existingSecret) }}
{{- fail "postgresql.external.directKey is a key of a Secret: it needs postgresql.external.existingSecret" }}
{{- end }}
{{- end }}
{{- if and .Values.coordinator.enabled (eq .Values.store.type "s3") (not .Values.store.s3.bucket) }}
{{- fail "store.type s3 needs store.s3.bucket" }}
{{- end }}
{{- if and (ne .Values.store.type "s3") .Values.store.s3.bucket }}
{{- fail "store.s3.bucket is set but store.type is filesystem: set store.type to s3" }}
{{- end }}
{{- if and .Values.coordinator.enabled (ne .Values.store.type "s3") .Values.store.s3.direct }}
{{- fail "store.s3.direct is set but store.type is filesystem: workers can reach a bucket directly, but not a volume" }}
{{- end }}
{{- range $client, $own := .Values.worker.clients }}
{{- $values := mergeOverwrite (deepCopy (omit $.Values.worker "clients")) $own }}
{{- if and (not $.Values.coordinator.enabled) (not $values.coordinator) }}
{{- fail (printf "worker.clients.%s needs worker.coordinator, the coordinator's address: this release has no coordinator" $client) }}
{{- end }}
{{- if ne (empty $values.tls.certificate) (empty $values.tls.key) }}
{{- fail (printf "worker.clients.%s: set both tls.certificate and tls.key, or neither" $client) }}
{{- end }}
{{- if and $values.tls.certificate (not $values.tls.secretName) }}
{{- fail (printf "worker.clients.%s: tls.certificate and tls.key name entries of a Secret: they need tls.secretName" $client) }}
{{- end }}
{{- $places := 0 }}
{{- range list $values.data.claim.name $values.data.hostPath $values.data.csi $values.data.s3.bucket }}
{{- if . }}{{ $places = add1 $places }}{{ end }}
{{- end }}
{{- if ne (int $places) 1 }}
{{- fail (printf "worker.clients.%s needs exactly one place for its images: set one of data.claim.name, data.hostPath, data.csi and data.s3.bucket" $client) }}
{{- end }}
{{- end }}
{{- end }}
