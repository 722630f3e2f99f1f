{{/* Parts of network policies: a head, and whom a pod may reach. */}}

{{- define "fedssl.networkPolicyHead" -}}
apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata:
  {{- include "fedssl.metadata" . | nindent 2 }}
spec:
  policyTypes: [Ingress, Egress]
  podSelector:
    matchLabels:
      {{- include "fedssl.selectorLabels" . | nindent 6 }}
{{- end }}

{{- define "fedssl.toNames" -}}
- ports: [{ port: 53, protocol: UDP }, { port: 53, protocol: TCP }]
{{- end }}

{{- define "fedssl.toApi" -}}
- ports: [{ port: 8000, protocol: TCP }]
  to:
    - podSelector:
        matchLabels:
          {{- include "fedssl.selectorLabels" (dict "root" . "component" "api") | nindent 10 }}
{{- end }}

{{- define "fedssl.toServers" -}}
{{- range $component := list "postgresql" "redis" }}
{{- $bundled := include (printf "fedssl.bundled%s" (title $component)) $ }}
- ports: [{ port: {{ ternary (ternary 5432 6379 (eq $component "postgresql")) (int (index $.Values $component).external.port) (ne $bundled "") }}, protocol: TCP }]
  {{- if $bundled }}
  to:
    - podSelector:
        matchLabels:
          {{- include "fedssl.selectorLabels" (dict "root" $ "component" $component) | nindent 10 }}
  {{- else }}
  {{- with $.Values.networkPolicy.serversAt }}
  to:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- end }}
{{- end }}
{{- end }}
