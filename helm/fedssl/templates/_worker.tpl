{{/* Parts of a worker. Arguments: root, component, client, values. */}}

{{- define "fedssl.workerEnv" -}}
- name: FEDSSL_WORKER_COORDINATOR
  value: {{ default (include "fedssl.apiAddress" .root) .values.coordinator | quote }}
{{- if not (or .values.coordinator .root.Values.api.tls.secretName) }}
# Within the cluster, where network policies restrict who can intercept it.
- name: FEDSSL_WORKER_INSECURE_HTTP
  value: "true"
{{- end }}
- name: FEDSSL_WORKER_ENROLMENT_TOKEN
  valueFrom:
    secretKeyRef:
      name: {{ include "fedssl.enrolmentSecret" . | quote }}
      key: {{ .values.enrolmentSecret.key | quote }}
      # It works once: from the second start on the worker uses its own token, which is in its state.
      optional: true
- name: FEDSSL_WORKER_DATA
  value: {{ printf "/data/%s" .values.data.path | trimSuffix "/" | quote }}
- name: FEDSSL_WORKER_DEVICE
  value: {{ ternary "cuda" "cpu" (gt (int .values.gpu.count) 0) }}
{{- if gt (int .values.gpu.count) 1 }}
- name: FEDSSL_WORKER_GPUS
  value: {{ .values.gpu.count | quote }}
{{- end }}
- name: FEDSSL_WORKER_THREADS
  value: {{ .values.settings.threads | quote }}
- name: FEDSSL_WORKER_MAX_PUBLIC_BYTES
  value: {{ int64 .values.settings.maxPublicBytes | quote }}
{{- with .values.settings.imageSize }}
- name: FEDSSL_WORKER_IMAGE_SIZE
  value: {{ . | quote }}
{{- end }}
{{- with .values.settings.channels }}
- name: FEDSSL_WORKER_CHANNELS
  value: {{ . | quote }}
{{- end }}
{{- if not (kindIs "invalid" .values.settings.maxUnreadable) }}
- name: FEDSSL_WORKER_MAX_UNREADABLE
  value: {{ .values.settings.maxUnreadable | quote }}
{{- end }}
{{- if .values.settings.noImageCache }}
- name: FEDSSL_WORKER_NO_IMAGE_CACHE
  value: "true"
{{- end }}
{{- if .values.settings.rescan }}
- name: FEDSSL_WORKER_RESCAN
  value: "true"
{{- end }}
{{- with .values.settings.labels }}
- name: FEDSSL_WORKER_LABELS
  value: {{ . | quote }}
{{- end }}
{{- with .values.settings.labelNames }}
- name: FEDSSL_WORKER_LABEL_NAMES
  value: {{ . | quote }}
{{- end }}
{{- if .values.policy }}
- name: FEDSSL_WORKER_POLICY
  value: /policy/policy.toml
{{- end }}
{{- with .values.tls }}
{{- if .secretName }}
{{- range $variable, $file := dict "CA_FILE" .ca "CLIENT_CERT" .certificate "CLIENT_KEY" .key }}
{{- with $file }}
- name: FEDSSL_WORKER_{{ $variable }}
  value: /tls/{{ . }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}
- name: FEDSSL_LIVENESS_FILE
  value: /tmp/alive
{{- include "fedssl.metricsEnv" (dict "root" .root "prefix" "FEDSSL_WORKER_") }}
{{- include "fedssl.tracingEnv" .root }}
{{- with .values.extraEnv }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- define "fedssl.workerData" -}}
- name: data
  {{- if .values.data.claim.name }}
  persistentVolumeClaim: { claimName: {{ .values.data.claim.name | quote }}, readOnly: true }
  {{- else if .values.data.hostPath }}
  hostPath: { path: {{ .values.data.hostPath | quote }}, type: Directory }
  {{- else if .values.data.csi }}
  csi:
    {{- toYaml (mergeOverwrite (deepCopy .values.data.csi) (dict "readOnly" true)) | nindent 4 }}
  {{- else }}
  persistentVolumeClaim: { claimName: {{ include "fedssl.fullname" .root }}-{{ .component }}-data, readOnly: true }
  {{- end }}
{{- end }}

{{/* A bucket as a volume, by a CSI driver that mounts objects (Mountpoint for Amazon S3, or a compatible one). */}}
{{- define "fedssl.workerBucket" -}}
{{- $data := printf "%s-data" .component }}
{{- $volume := printf "%s-%s-%s" (include "fedssl.fullname" .root) $data .root.Release.Namespace | trimSuffix "-" }}
apiVersion: v1
kind: PersistentVolume
metadata:
  name: {{ $volume }}
  labels:
    {{- include "fedssl.labels" . | nindent 4 }}
spec:
  capacity: { storage: 1Gi } # meaningless for a bucket, but Kubernetes requires it
  accessModes: [ReadOnlyMany]
  persistentVolumeReclaimPolicy: Retain
  storageClassName: ""
  claimRef: { namespace: {{ .root.Release.Namespace | quote }}, name: {{ include "fedssl.fullname" .root }}-{{ $data }} }
  {{- with .values.data.s3.mountOptions }}
  mountOptions:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  csi:
    driver: {{ .values.data.s3.driver | quote }}
    volumeHandle: {{ $volume }}
    volumeAttributes: { bucketName: {{ .values.data.s3.bucket | quote }} }
---
apiVersion: v1
kind: PersistentVolumeClaim
metadata:
  {{- include "fedssl.metadata" (merge (dict "name" $data) .) | nindent 2 }}
spec:
  accessModes: [ReadOnlyMany]
  storageClassName: ""
  volumeName: {{ $volume }}
  resources:
    requests: { storage: 1Gi }
{{- end }}
