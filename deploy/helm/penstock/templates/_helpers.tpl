{{- define "penstock.name" -}}
{{- if contains "penstock" .Release.Name }}{{ .Release.Name }}{{ else }}{{ .Release.Name }}-penstock{{ end -}}
{{- end }}

{{- define "penstock.secretName" -}}
{{- .Values.secret.name | default (include "penstock.name" .) -}}
{{- end }}

{{- define "penstock.hasSecret" -}}
{{- if or .Values.secret.name .Values.secret.values }}true{{ end -}}
{{- end }}

{{/* Labels of one role: (list root role) */}}
{{- define "penstock.selector" -}}
{{- $root := index . 0 -}}
app.kubernetes.io/name: penstock
app.kubernetes.io/instance: {{ $root.Release.Name }}
app.kubernetes.io/component: {{ index . 1 }}
{{- end }}

{{- define "penstock.labels" -}}
{{ include "penstock.selector" . }}
{{- $root := index . 0 }}
app.kubernetes.io/version: {{ $root.Chart.AppVersion | quote }}
helm.sh/chart: {{ printf "%s-%s" $root.Chart.Name $root.Chart.Version }}
{{- end }}

{{/* The role that answers HTTP requests. */}}
{{- define "penstock.front" -}}
{{- if eq .Values.mode "fleet" }}gateway{{ else }}server{{ end -}}
{{- end }}

{{/* Whether the gateways of a fleet share a volume. */}}
{{- define "penstock.sharesVolume" -}}
{{- if and (eq .Values.mode "fleet") (not .Values.filesUrl) }}true{{ end -}}
{{- end }}

{{- define "penstock.scheme" -}}
{{- if .Values.tls.secretName }}HTTPS{{ else }}HTTP{{ end -}}
{{- end }}

{{/* What every pod has: identity, grace, image. (dict root role args ...) fill in the rest. */}}
{{- define "penstock.podBasics" -}}
{{- with .Values.imagePullSecrets }}
imagePullSecrets: {{ toYaml . | nindent 2 }}
{{- end }}
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  runAsGroup: 10001
  fsGroup: 10001
  seccompProfile: {type: RuntimeDefault}
{{- end }}

{{/* Pods that answer requests may ask the Kubernetes API for external servers; no other pod has a token. */}}
{{- define "penstock.frontAccount" -}}
{{- if .Values.discovery.enabled }}
serviceAccountName: {{ include "penstock.name" . }}-discovery
automountServiceAccountToken: true
{{- else }}
automountServiceAccountToken: false
{{- end }}
{{- end }}

{{/* Whether the pods that answer requests have files from the chart. */}}
{{- define "penstock.hasFiles" -}}
{{- if or .Values.settings .Values.external }}true{{ end -}}
{{- end }}

{{- define "penstock.containerBasics" -}}
image: "{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}"
imagePullPolicy: {{ .Values.image.pullPolicy }}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities: {drop: [ALL]}
{{- if include "penstock.hasSecret" . }}
envFrom:
  - secretRef: {name: {{ include "penstock.secretName" . }}}
{{- end }}
{{- end }}

{{/* Flags, probes and port of a role that answers HTTP requests. */}}
{{- define "penstock.frontArgs" -}}
- --host=0.0.0.0
- --port=8000
- --require-keys
- --lame-duck-s={{ .Values.shutdown.lameDuckSeconds }}
- --drain-timeout={{ .Values.shutdown.drainSeconds }}
- --log-format=json
{{- if .Values.settings }}
- --settings=/etc/penstock/settings.toml
{{- end }}
{{- if .Values.external }}
- --config=/etc/penstock/penstock.toml
{{- end }}
{{- with .Values.filesUrl }}
- --files-url={{ . }}
{{- end }}
{{- if .Values.tls.secretName }}
- --ssl-certfile=/tls/tls.crt
- --ssl-keyfile=/tls/tls.key
{{- end }}
{{- end }}

{{- define "penstock.frontProbes" -}}
ports:
  - {name: http, containerPort: 8000}
startupProbe:
  httpGet: {path: /ready, port: http, scheme: {{ include "penstock.scheme" . }}}
  periodSeconds: 5
  failureThreshold: {{ div (add .Values.startupSeconds 4) 5 }}
readinessProbe:
  httpGet: {path: /ready, port: http, scheme: {{ include "penstock.scheme" . }}}
  periodSeconds: 2
  timeoutSeconds: 2
livenessProbe:
  httpGet: {path: /health, port: http, scheme: {{ include "penstock.scheme" . }}}
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 6
lifecycle:
  preStop:
    exec: {command: [sleep, {{ .Values.shutdown.preStopSeconds | quote }}]}
{{- end }}

{{- define "penstock.frontMounts" -}}
- {name: data, mountPath: /data}
- {name: temporary, mountPath: /tmp}
{{- if include "penstock.hasFiles" . }}
- {name: settings, mountPath: /etc/penstock}
{{- end }}
{{- if .Values.tls.secretName }}
- {name: tls, mountPath: /tls, readOnly: true}
{{- end }}
{{- end }}

{{- define "penstock.frontVolumes" -}}
- {name: temporary, emptyDir: {}}
{{- if include "penstock.hasFiles" . }}
- name: settings
  configMap: {name: {{ include "penstock.name" . }}-settings}
{{- end }}
{{- if .Values.tls.secretName }}
- name: tls
  secret: {secretName: {{ .Values.tls.secretName }}}
{{- end }}
{{- end }}

{{- define "penstock.modelVolume" -}}
- name: models
  {{- if .Values.models.existingClaim }}
  persistentVolumeClaim: {claimName: {{ .Values.models.existingClaim }}}
  {{- else }}
  emptyDir: {sizeLimit: {{ .Values.models.sizeLimit }}}
  {{- end }}
{{- end }}

{{/* Resources with GPUs: (dict "resources" r "gpus" n) */}}
{{- define "penstock.resources" -}}
{{- $resources := deepCopy .resources -}}
{{- if gt (int .gpus) 0 -}}
{{- $_ := set $resources "limits" (merge (dict "nvidia.com/gpu" (int .gpus)) ($resources.limits | default dict)) -}}
{{- end -}}
{{- toYaml $resources -}}
{{- end }}

{{/* Name and address of a pod, in the environment. */}}
{{- define "penstock.podEnv" -}}
- name: POD_IP
  valueFrom:
    fieldRef: {fieldPath: status.podIP}
{{- end }}
