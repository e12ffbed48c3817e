{{/* A removed pod unloads its models, and ends only after its streams: by default, pods are removed slowly. */}}
{{- define "triton-gateway.scalingBehavior" -}}
{{- with .Values.autoscaling.behavior -}}
{{ toYaml . }}
{{- else -}}
scaleDown:
  stabilizationWindowSeconds: 300
  policies:
    - type: Pods
      value: 1
      periodSeconds: 120
{{- end -}}
{{- end }}
