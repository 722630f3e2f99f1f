{{/* Names, labels and images: every other file takes them from here. */}}

{{- define "fedssl.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 40 | trimSuffix "-" }}
{{- end }}

{{/* Short enough for every suffix that follows. */}}
{{- define "fedssl.fullname" -}}
{{- if .Values.fullnameOverride }}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" }}
{{- else if contains (include "fedssl.name" .) .Release.Name }}
{{- .Release.Name | trunc 40 | trimSuffix "-" }}
{{- else }}
{{- printf "%s-%s" .Release.Name (include "fedssl.name" .) | trunc 40 | trimSuffix "-" }}
{{- end }}
{{- end }}

{{/* Arguments: (dict "root" $ "component" "api"). */}}
{{- define "fedssl.selectorLabels" -}}
app.kubernetes.io/name: {{ include "fedssl.name" .root | quote }}
app.kubernetes.io/instance: {{ .root.Release.Name | quote }}
app.kubernetes.io/component: {{ .component }}
{{- end }}

{{- define "fedssl.labels" -}}
{{ include "fedssl.selectorLabels" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version }}
{{- end }}

{{/* The metadata of a component's object. "name" is the suffix, by default the component. */}}
{{- define "fedssl.metadata" -}}
name: {{ include "fedssl.fullname" .root }}-{{ default .component .name }}
namespace: {{ .root.Release.Namespace | quote }}
labels:
  {{- include "fedssl.labels" . | nindent 2 }}
{{- end }}

{{/* A digest takes precedence over a tag. The default tag of the project's own images is the chart's appVersion. */}}
{{- define "fedssl.image" -}}
{{- $image := .values.image }}
{{- $own := hasPrefix "fedssl-" (base $image.repository) }}
{{- $registry := ternary .root.Values.image.registry "" $own }}
{{- $name := ternary (printf "%s/%s" $registry $image.repository) $image.repository (ne $registry "") }}
{{- if $image.digest }}
{{- printf "%s@%s" $name $image.digest }}
{{- else }}
{{- printf "%s:%s" $name (coalesce $image.tag .root.Values.image.tag .root.Chart.AppVersion) }}
{{- end }}
{{- end }}

{{/* The API's address within the cluster. */}}
{{- define "fedssl.apiAddress" -}}
{{ ternary "https" "http" (ne .Values.api.tls.secretName "") }}://{{ include "fedssl.fullname" . }}-api:{{ .Values.api.service.port }}
{{- end }}

{{- define "fedssl.bundledPostgresql" -}}
{{- if and .Values.coordinator.enabled (not .Values.postgresql.external.existingSecret) }}true{{ end }}
{{- end }}

{{- define "fedssl.bundledRedis" -}}
{{- if and .Values.coordinator.enabled (not .Values.redis.external.existingSecret) }}true{{ end }}
{{- end }}

{{- define "fedssl.storeClaim" -}}
{{- default (printf "%s-store" (include "fedssl.fullname" .)) .Values.store.existingClaim }}
{{- end }}

{{/* A pod's service account. Only the coordinator's may have a role, which can read every client's updates. */}}
{{- define "fedssl.serviceAccount" -}}
{{- if has .component (include "fedssl.coordinatorComponents" . | fromYamlArray) }}
{{- default (printf "%s-coordinator" (include "fedssl.fullname" .root)) .root.Values.serviceAccounts.coordinator.name }}
{{- else }}
{{- default (include "fedssl.fullname" .root) .root.Values.serviceAccounts.others.name }}
{{- end }}
{{- end }}

{{/* The components that have the database, the queues and the store. */}}
{{- define "fedssl.coordinatorComponents" -}}
[api, aggregator, distiller, evaluator, notifier, beat, migrations]
{{- end }}

{{/* The components that serve a queue, with the names of its queues. */}}
{{- define "fedssl.queues" -}}
aggregator: aggregate
distiller: distill
evaluator: evaluate
notifier: notify
{{- end }}

{{/* The Secret of a worker's enrolment token. Arguments: root, client, values. */}}
{{- define "fedssl.enrolmentSecret" -}}
{{- default (printf "%s-worker-%s-enrolment" (include "fedssl.fullname" .root) .client) .values.enrolmentSecret.name }}
{{- end }}
