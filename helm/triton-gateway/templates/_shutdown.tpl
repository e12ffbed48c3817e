{{/* Seconds from the pod's deletion to SIGKILL. The gateway gets SIGTERM after its preStop hook. */}}
{{- define "triton-gateway.gracePeriodSeconds" -}}
{{- $shutdown := .Values.shutdown -}}
{{- $sleepSeconds := dig "preStop" "sleep" "seconds" 0 (default dict .Values.gateway.lifecycle) | int -}}
{{ add $sleepSeconds $shutdown.delaySeconds $shutdown.longestStreamSeconds $shutdown.tritonExitSeconds $shutdown.marginSeconds }}
{{- end }}

{{/* Seconds from a failed probe to SIGKILL. A container that hangs finishes nothing, so it does not get the pod's grace
     period, which is as long as the longest stream. */}}
{{- define "triton-gateway.hungSeconds" -}}
10
{{- end }}

{{/* Whether the pod holds devices of its node, of which a second pod may find none. */}}
{{- define "triton-gateway.holdsGpus" -}}
{{ and .Values.triton.enabled (or (gt (int .Values.triton.gpus) 0) .Values.resourceClaims) | empty | ternary "" "true" }}
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
