{{- define "triton-gateway.name" -}}
{{ default .Chart.Name .Values.nameOverride | trunc 63 | trimSuffix "-" }}
{{- end }}

{{/* The release's name, followed by the chart's name unless it is included. 50 characters leave space for suffixes. */}}
{{- define "triton-gateway.fullname" -}}
{{- $name := include "triton-gateway.name" . -}}
{{- $joined := contains $name .Release.Name | ternary .Release.Name (printf "%s-%s" .Release.Name $name) -}}
{{ default $joined .Values.fullnameOverride | trunc 50 | trimSuffix "-" }}
{{- end }}

{{- define "triton-gateway.serviceAccountName" -}}
{{ default (.Values.serviceAccount.create | ternary (include "triton-gateway.fullname" .) "default") .Values.serviceAccount.name }}
{{- end }}

{{- define "triton-gateway.selectorLabels" -}}
app.kubernetes.io/name: {{ include "triton-gateway.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: gateway
{{- end }}

{{- define "triton-gateway.labels" -}}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{ include "triton-gateway.selectorLabels" . }}
{{- end }}

{{/* Takes a list of the `image` values and the chart. Returns repository@digest, otherwise repository:tag. */}}
{{- define "triton-gateway.image" -}}
{{- $image := index . 0 -}}
{{- $tag := printf ":%s" (default (index . 1).AppVersion $image.tag) -}}
{{ $image.repository }}{{ empty $image.digest | ternary $tag (printf "@%s" $image.digest) }}
{{- end }}

{{/* The job label that the Prometheus operator sets for the targets of a PodMonitor. */}}
{{- define "triton-gateway.job" -}}
{{ .Release.Namespace }}/{{ include "triton-gateway.fullname" . }}
{{- end }}
