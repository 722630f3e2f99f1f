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

{{/* Peers that may connect to a pod other than the API's: none, or those that scrape its metrics. Arguments: root,
component, serves. */}}
{{- define "fedssl.metricsIngress" -}}
{{- $extra := include "fedssl.extraIngress" . }}
{{- $scraped := and .serves .root.Values.podMonitor.enabled }}
{{- if or $scraped $extra }}
ingress:
  {{- $extra | nindent 2 }}
  {{- if $scraped }}
  - ports: [{ port: {{ .root.Values.podMonitor.port }}, protocol: TCP }]
    from:
      {{- toYaml (default (list (dict "namespaceSelector" (dict))) .root.Values.networkPolicy.metricsFrom) | nindent 6 }}
  {{- end }}
{{- else }}
ingress: []
{{- end }}
{{- end }}

{{/* The port of an http(s) address. */}}
{{- define "fedssl.portOf" -}}
{{- regexFind ":[0-9]+$" (urlParse .).host | trimPrefix ":" | default (ternary "80" "443" (hasPrefix "http:" .)) }}
{{- end }}

{{/* The collector of traces, if there is one. Argument: root. */}}
{{- define "fedssl.toCollector" -}}
{{- if .Values.tracing.endpoint }}
- ports: [{ port: {{ include "fedssl.portOf" .Values.tracing.endpoint }}, protocol: TCP }]
  {{- with .Values.networkPolicy.tracesAt }}
  to:
    {{- toYaml . | nindent 4 }}
  {{- end }}
{{- end }}
{{- end }}

{{/* Further rules of a component's policy. Arguments: root, component. */}}
{{- define "fedssl.extraIngress" -}}
{{- with index .root.Values.networkPolicy.extraIngress .component }}
{{ toYaml . }}
{{- end }}
{{- end }}
{{- define "fedssl.extraEgress" -}}
{{- with index .root.Values.networkPolicy.extraEgress .component }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- define "fedssl.toNames" -}}
{{- $port := default 53 .Values.networkPolicy.dnsPort }}
- ports: [{ port: {{ $port }}, protocol: UDP }, { port: {{ $port }}, protocol: TCP }]
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
- ports: [{ port: {{ default (include "fedssl.portOf" .endpoint) .root.Values.store.s3.port }}, protocol: TCP }]
  {{- with .root.Values.networkPolicy.objectStoreAt }}
  to:
    {{- toYaml . | nindent 4 }}
  {{- end }}
{{- end }}
