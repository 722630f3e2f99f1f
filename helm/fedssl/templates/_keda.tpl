{{/* Scale by the unfinished runs or jobs in Postgres. The length of the queue is not enough: it no longer contains a job
that has started, so KEDA would remove that job's pod. */}}
{{- define "fedssl.scaledObject" -}}
{{- $queries := dict
  "aggregator" "SELECT count(*) FROM runs WHERE state = 'running'"
  "distiller" "SELECT count(*) FROM distillation_jobs WHERE state IN ('queued', 'running')"
  "evaluator" "SELECT count(*) FROM evaluations WHERE state IN ('queued', 'running')"
  "notifier" "SELECT count(*) FROM notification_deliveries WHERE state = 'pending' AND next_try_at <= now()" }}
apiVersion: keda.sh/v1alpha1
kind: ScaledObject
metadata:
  {{- include "fedssl.metadata" . | nindent 2 }}
spec:
  scaleTargetRef: { name: {{ include "fedssl.fullname" .root }}-{{ .component }} }
  minReplicaCount: {{ .values.keda.minReplicas }}
  maxReplicaCount: {{ .values.keda.maxReplicas }}
  cooldownPeriod: {{ .values.keda.cooldownSeconds }}
  triggers:
    - type: postgresql
      metadata:
        query: {{ get $queries .component | quote }}
        targetQueryValue: {{ .values.keda.jobsPerReplica | quote }}
      authenticationRef: { name: {{ include "fedssl.fullname" .root }}-{{ .component }} }
---
apiVersion: keda.sh/v1alpha1
kind: TriggerAuthentication
metadata:
  {{- include "fedssl.metadata" . | nindent 2 }}
spec:
  secretTargetRef:
    - parameter: connection
      {{- if include "fedssl.bundledPostgresql" .root }}
      name: {{ include "fedssl.fullname" .root }}-postgresql
      key: connection
      {{- else }}
      name: {{ .root.Values.postgresql.external.existingSecret | quote }}
      key: {{ .root.Values.postgresql.external.kedaConnectionKey | quote }}
      {{- end }}
{{- end }}
