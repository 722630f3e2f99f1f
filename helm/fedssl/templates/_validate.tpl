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

{{/* Volumes and mounts that values add to a component. Arguments: path, values. */}}
{{- define "fedssl.validateVolumes" -}}
{{- $names := list }}
{{- range .values.extraVolumes }}
{{- if has .name (list "authorities" "config" "data" "gpus" "policy" "run" "shared-memory" "state" "store" "tls" "tmp") }}
{{- fail (printf "%s.extraVolumes has a volume named %s, which is the name of one of the chart's own volumes: choose another name" $.path .name) }}
{{- end }}
{{- $names = append $names .name }}
{{- end }}
{{- range .values.extraVolumeMounts }}
{{- if not (has .name $names) }}
{{- fail (printf "%s.extraVolumeMounts mounts the volume %s, which %s.extraVolumes does not have: it has %s" $.path .name $.path (join ", " $names | default "none")) }}
{{- end }}
{{- end }}
{{- end }}

{{- define "fedssl.validate" -}}
{{- $fullname := include "fedssl.fullname" . }}
{{- if not (regexMatch "^[a-z]([a-z0-9-]*[a-z0-9])?$" $fullname) }}
{{- fail (printf "the names of all objects would begin with %s, but the name of a Service begins with a letter and contains only lower-case letters, digits and hyphens: set fullnameOverride to such a name, for example fedssl" $fullname) }}
{{- end }}
{{- range $old, $new := fromYaml (include "fedssl.removedKeys" .) }}
{{- if hasKey $.Values $old }}
{{- fail (printf "%s is not a value of this chart: use %s" $old $new) }}
{{- end }}
{{- end }}
{{- if not (or .Values.image.registry (eq .Values.image.pullPolicy "Never")) }}
{{- fail "image.registry is not set: set it to the registry that has this project's images, for example --set image.registry=registry.example.org/ml; docs/deploy.md explains how to push them. If the images were loaded into the nodes, set image.pullPolicy to Never instead" }}
{{- end }}
{{- range $component := list "api" "aggregator" "distiller" "evaluator" "notifier" "beat" "migrations" "worker" "postgresql" "redis" }}
{{- include "fedssl.validateVolumes" (dict "path" $component "values" (index $.Values $component)) }}
{{- end }}
{{- with .Values.serviceAccounts }}
{{- range $account := list "coordinator" "others" }}
{{- with index $.Values.serviceAccounts $account }}
{{- if and (not .create) (not .name) }}
{{- fail (printf "serviceAccounts.%s.create is false: set serviceAccounts.%s.name to the account that exists" $account $account) }}
{{- end }}
{{- end }}
{{- end }}
{{- if and .coordinator.name (eq .coordinator.name .others.name) }}
{{- fail (printf "serviceAccounts.coordinator.name and serviceAccounts.others.name are both %s: workers must not have the coordinator's account, which may read every client's updates" .coordinator.name) }}
{{- end }}
{{- end }}
{{- range $server := list "postgresql" "redis" }}
{{- with (index $.Values $server).external }}
{{- if and .caSecret.name (not .existingSecret) }}
{{- fail (printf "%s.external.caSecret is for a server of your own: it needs %s.external.existingSecret" $server $server) }}
{{- end }}
{{- end }}
{{- end }}
{{- if and .Values.store.s3.caSecret.name (not (hasPrefix "https:" .Values.store.s3.endpoint)) }}
{{- fail "store.s3.caSecret needs store.s3.endpoint with https: AWS's own certificates need no Secret" }}
{{- end }}
{{- $isExposed := ne .Values.api.service.type "ClusterIP" }}
{{- if and $isExposed (not (or .Values.api.tls.secretName .Values.api.service.allowHttp)) }}
{{- fail (printf "api.service.type %s would send tokens unencrypted: set api.tls.secretName, a Secret of type kubernetes.io/tls, or, if the load balancer itself encrypts, api.service.allowHttp" .Values.api.service.type) }}
{{- end }}
{{- range $key := list "loadBalancerClass" "loadBalancerSourceRanges" }}
{{- if and (index $.Values.api.service $key) (ne $.Values.api.service.type "LoadBalancer") }}
{{- fail (printf "api.service.%s has no effect with api.service.type %s: set the type to LoadBalancer" $key $.Values.api.service.type) }}
{{- end }}
{{- end }}
{{- if and .Values.api.service.externalTrafficPolicy (not $isExposed) }}
{{- fail "api.service.externalTrafficPolicy has no effect with api.service.type ClusterIP: set the type to LoadBalancer or NodePort" }}
{{- end }}
{{- range $way := list "ingress" "gateway" }}
{{- if and (index $.Values.api $way).enabled $.Values.api.tls.secretName }}
{{- fail (printf "api.%s.enabled and api.tls.secretName exclude each other: with an Ingress or a Gateway, that is where TLS ends" $way) }}
{{- end }}
{{- end }}
{{- with .Values.api.gateway }}
{{- if and .enabled (not .host) }}
{{- fail "api.gateway.enabled needs api.gateway.host, the host name that workers use for the API" }}
{{- end }}
{{- if and .enabled (not .parentRefs) }}
{{- fail "api.gateway.enabled needs api.gateway.parentRefs, the Gateways that serve the host, for example [{ name: public, namespace: gateways }]" }}
{{- end }}
{{- if and .enabled (not $.Values.api.trustedProxies) }}
{{- fail "api.gateway.enabled needs api.trustedProxies, the addresses or networks of the Gateway's pods: without it the limits count all callers as one, and a flood from one of them blocks the others" }}
{{- end }}
{{- end }}
{{- if and .Values.api.ingress.enabled (not .Values.api.ingress.host) }}
{{- fail "api.ingress.enabled needs api.ingress.host, the host name that workers use for the API" }}
{{- end }}
{{- if and .Values.api.ingress.enabled (not .Values.api.trustedProxies) }}
{{- fail "api.ingress.enabled needs api.trustedProxies, the addresses or networks of the Ingress controller's pods: without it the limits count all callers as one, and a flood from one of them blocks the others" }}
{{- end }}
{{- with .Values.api.oidc }}
{{- if and .issuer (not (and .clientId .roles)) }}
{{- fail "api.oidc.issuer needs api.oidc.clientId, the coordinator's id at the provider, and api.oidc.roles, for example {ml-team: operator}" }}
{{- end }}
{{- if and (not .issuer) (or .clientId .roles .clientSecret.name .caSecret.name) }}
{{- fail "api.oidc.issuer is not set, but other values of api.oidc are: set it to the provider's issuer, such as https://id.example.org" }}
{{- end }}
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
{{- $name := printf "%s-worker-%s" $fullname $client }}
{{- if gt (len $name) 52 }}
{{- fail (printf "worker.clients.%s: its StatefulSet would have the name %s with %d characters, but Kubernetes creates pods only for names of up to 52: set a shorter fullnameOverride" $client $name (len $name)) }}
{{- end }}
{{- $values := mergeOverwrite (deepCopy (omit $.Values.worker "clients")) $own }}
{{- if and (not $.Values.coordinator.enabled) (not $values.coordinator) }}
{{- fail (printf "worker.clients.%s needs worker.coordinator, the coordinator's address: this release has no coordinator" $client) }}
{{- end }}
{{- include "fedssl.validateVolumes" (dict "path" (printf "worker.clients.%s" $client) "values" $values) }}
{{- if ne (empty $values.tls.certificate) (empty $values.tls.key) }}
{{- fail (printf "worker.clients.%s: set both tls.certificate and tls.key, or neither" $client) }}
{{- end }}
{{- if and $values.tls.certificate (not $values.tls.secretName) }}
{{- fail (printf "worker.clients.%s: tls.certificate and tls.key name entries of a Secret: they need tls.secretName" $client) }}
{{- end }}
{{- if and $values.settings.labelNames (not $values.settings.labels) }}
{{- fail (printf "worker.clients.%s: settings.labelNames renames the classes of settings.labels: set both" $client) }}
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
