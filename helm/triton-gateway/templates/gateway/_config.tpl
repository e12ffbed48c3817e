{{/* A ConfigMap's key cannot contain a slash, so the key of `samples/sign.png` is `samples__sign.png`. */}}
{{- define "triton-gateway.configKey" -}}
{{ replace "/" "__" . }}
{{- end }}

{{- define "triton-gateway.configItems" -}}
{{- range concat (list "gateway.yaml") (keys .Values.config.files | sortAlpha) (keys .Values.config.binaryFiles | sortAlpha) }}
- key: {{ include "triton-gateway.configKey" . }}
  path: {{ . }}
{{- end }}
{{- end }}
