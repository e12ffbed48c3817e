{{/* Seconds from the pod's deletion to SIGKILL. */}}
{{- define "triton-gateway.gracePeriodSeconds" -}}
{{- $shutdown := .Values.shutdown -}}
{{ add $shutdown.delaySeconds $shutdown.longestStreamSeconds $shutdown.tritonExitSeconds $shutdown.marginSeconds }}
{{- end }}

{{/* Seconds from a failed probe to SIGKILL. A container that hangs finishes nothing, so it does not get the pod's grace
     period, which is as long as the longest stream. */}}
{{- define "triton-gateway.hungSeconds" -}}
10
{{- end }}

{{- define "triton-gateway.holdsGpus" -}}
{{ and .Values.triton.enabled (gt (int .Values.triton.gpus) 0) | ternary "true" "" }}
{{- end }}

{{- define "triton-gateway.strategy" -}}
{{- $holdsGpus := include "triton-gateway.holdsGpus" . -}}
{{- if .Values.strategy -}}
{{ toYaml .Values.strategy }}
{{- else if and $holdsGpus (not .Values.autoscaling.enabled) (le (int .Values.replicaCount) 1) -}}
type: Recreate
{{- else -}}
type: RollingUpdate
rollingUpdate:
  maxSurge: {{ empty $holdsGpus | ternary 1 0 }}
  maxUnavailable: {{ empty $holdsGpus | ternary 0 1 }}
{{- end -}}
{{- end }}
