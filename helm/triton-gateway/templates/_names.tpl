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

{{/* The labels that the chart itself sets. */}}
{{- define "triton-gateway.ownLabels" -}}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{ include "triton-gateway.selectorLabels" . }}
{{- end }}

{{- define "triton-gateway.labels" -}}
{{ include "triton-gateway.ownLabels" . }}
{{- with .Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/* Takes `root` and an object's `name`; optional: `labels` instead of the gateway's, `moreLabels`, and `annotations`.
     Returns its metadata. */}}
{{- define "triton-gateway.metadata" -}}
{{- $labels := default (include "triton-gateway.labels" .root) .labels | fromYaml -}}
{{- $metadata := dict "name" .name "labels" (merge $labels (default dict .moreLabels)) -}}
{{- $annotations := merge (deepCopy (default dict .annotations)) (default dict .root.Values.commonAnnotations) -}}
{{ dict "metadata" (merge $metadata (empty $annotations | ternary dict (dict "annotations" $annotations))) | toYaml }}
{{- end }}

{{/* Takes a list of a component's name and the root context. Returns the labels of an object that is not the gateway. */}}
{{- define "triton-gateway.componentLabels" -}}
{{- $root := index . 1 -}}
{{ merge (dict "app.kubernetes.io/component" (index . 0)) (include "triton-gateway.labels" $root | fromYaml) | toYaml }}
{{- end }}

{{/* Takes a list of the `image` values and the root context. Returns repository@digest, otherwise repository:tag. Adds
     `global.imageRegistry` to a repository that names no registry. */}}
{{- define "triton-gateway.image" -}}
{{- $image := index . 0 -}}
{{- $root := index . 1 -}}
{{- $tag := printf ":%s" (default $root.Chart.AppVersion $image.tag) -}}
{{- $registry := dig "imageRegistry" "" (default dict $root.Values.global) -}}
{{- $hasRegistry := regexMatch "^([^/]*[.:][^/]*|localhost)/" $image.repository -}}
{{ or (empty $registry) $hasRegistry | ternary "" (printf "%s/" $registry) }}{{ $image.repository }}{{ empty $image.digest | ternary $tag (printf "@%s" $image.digest) }}
{{- end }}

{{/* Returns imagePullSecrets as a list of objects. */}}
{{- define "triton-gateway.pullSecrets" -}}
{{- range .Values.imagePullSecrets }}
- name: {{ kindIs "map" . | ternary . (dict "name" .) | dig "name" "" }}
{{- end }}
{{- end }}

{{/* Takes a list of a probe's times in the values and the chart's defaults. Returns them merged. */}}
{{- define "triton-gateway.probeTimes" -}}
{{ merge (deepCopy (default dict (index . 0))) (index . 1) | toYaml }}
{{- end }}

{{/* Seconds between two scrapes of the enabled monitor. */}}
{{- define "triton-gateway.scrapeSeconds" -}}
{{ .Values.podMonitor.enabled | ternary .Values.podMonitor .Values.serviceMonitor | dig "intervalSeconds" 0 }}
{{- end }}

{{/* The job label that the Prometheus operator sets for the targets of a PodMonitor. The ServiceMonitor sets the same label. */}}
{{- define "triton-gateway.job" -}}
{{ .Release.Namespace }}/{{ include "triton-gateway.fullname" . }}
{{- end }}
