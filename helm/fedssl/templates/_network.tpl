{{/* Parts of network policies: the head, and the peers to which a pod may connect. */}}

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

{{/* Peers that may connect to a pod other than the API's: none, or those that scrape its metrics. Arguments: root, serves. */}}
{{- define "fedssl.metricsIngress" -}}
{{- if and .serves .root.Values.podMonitor.enabled }}
ingress:
  - ports: [{ port: {{ .root.Values.podMonitor.port }}, protocol: TCP }]
    from:
      {{- toYaml (default (list (dict "namespaceSelector" (dict))) .root.Values.networkPolicy.metricsFrom) | nindent 6 }}
{{- else }}
ingress: []
{{- end }}
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
{{- if and (not (include "fedssl.bundledPostgresql" .)) .Values.postgresql.external.directKey }}
- ports: [{ port: {{ int .Values.postgresql.external.directPort }}, protocol: TCP }]
  {{- with .Values.networkPolicy.serversAt }}
  to:
    {{- toYaml . | nindent 4 }}
  {{- end }}
{{- end }}
{{- end }}

{{/* The object store, at the port of its address. Arguments: root, endpoint. */}}
{{- define "fedssl.toObjectStore" -}}
{{- $port := regexFind ":[0-9]+$" .endpoint | trimPrefix ":" | default (ternary 80 443 (hasPrefix "http:" .endpoint)) }}
- ports: [{ port: {{ default $port .root.Values.store.s3.port }}, protocol: TCP }]
  {{- with .root.Values.networkPolicy.objectStoreAt }}
  to:
    {{- toYaml . | nindent 4 }}
  {{- end }}
{{- end }}
