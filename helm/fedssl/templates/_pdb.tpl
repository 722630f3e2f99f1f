{{/* None if all pods of the coordinator run on one node: its drain would wait forever, because no pod can start on another
node while one of them is left. */}}
{{- define "fedssl.podDisruptionBudget" -}}
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata:
  {{- include "fedssl.metadata" . | nindent 2 }}
spec:
  maxUnavailable: {{ .values.podDisruptionBudget.maxUnavailable }}
  selector:
    matchLabels:
      {{- include "fedssl.selectorLabels" . | nindent 6 }}
{{- end }}
