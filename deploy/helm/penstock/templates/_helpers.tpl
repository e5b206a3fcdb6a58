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

{{/* Whether the parts of a fleet find each other through the Kubernetes API. */}}
{{- define "penstock.registersInKubernetes" -}}
{{- if and (eq .Values.mode "fleet") (eq .Values.registry "kubernetes") }}true{{ end -}}
{{- end }}

{{/* Whether a component may ask the Kubernetes API: (list root component) */}}
{{- define "penstock.hasAccount" -}}
{{- $root := index . 0 -}}
{{- $component := index . 1 -}}
{{- if and (include "penstock.registersInKubernetes" $root) (or (ne $component "control") $root.Values.control.enabled) -}}
true
{{- else if and $root.Values.discovery.enabled (eq $component (include "penstock.front" $root)) -}}
true
{{- end -}}
{{- end }}

{{/* The account of a component's pods; no token where none is needed: (list root component) */}}
{{- define "penstock.account" -}}
{{- if include "penstock.hasAccount" . }}
serviceAccountName: {{ include "penstock.name" (index . 0) }}-{{ index . 1 }}
automountServiceAccountToken: true
{{- else }}
automountServiceAccountToken: false
{{- end }}
{{- end }}

{{/* A component's binding to a Role, and the Role up to its rules: (list root name component namespace) */}}
{{- define "penstock.role" -}}
{{- $root := index . 0 -}}
{{- $account := printf "%s-%s" (include "penstock.name" $root) (index . 2) -}}
{{- $name := printf "%s-%s" (include "penstock.name" $root) (index . 1) -}}
{{- $labels := include "penstock.labels" (list $root (index . 2)) }}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: RoleBinding
metadata:
  name: {{ $name }}
  namespace: {{ index . 3 }}
  labels: {{ $labels | nindent 4 }}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: Role, name: {{ $name }}}
subjects:
  - {kind: ServiceAccount, name: {{ $account }}, namespace: {{ $root.Release.Namespace }}}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: Role
metadata:
  name: {{ $name }}
  namespace: {{ index . 3 }}
  labels: {{ $labels | nindent 4 }}
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

{{/* Where the parts of the fleet find each other, in the environment. */}}
{{- define "penstock.registryEnv" -}}
{{- if include "penstock.registersInKubernetes" . }}
- {name: PENSTOCK_REGISTRY, value: "kubernetes://{{ .Release.Namespace }}/{{ include "penstock.name" . }}"}
{{- end }}
{{- end }}

{{/* Name and address of a pod, in the environment. */}}
{{- define "penstock.podEnv" -}}
- name: POD_IP
  valueFrom:
    fieldRef: {fieldPath: status.podIP}
{{- include "penstock.registryEnv" . }}
{{- if include "penstock.registersInKubernetes" . }}
- name: POD_NAME
  valueFrom:
    fieldRef: {fieldPath: metadata.name}
- name: POD_UID
  valueFrom:
    fieldRef: {fieldPath: metadata.uid}
{{- end }}
{{- end }}
