{{/* A removed pod unloads its models, and ends only after its streams: pods are removed slowly. */}}
{{- define "triton-gateway.scalingBehavior" -}}
scaleDown:
  stabilizationWindowSeconds: 300
  policies:
    - type: Pods
      value: 1
      periodSeconds: 120
{{- end }}
