{{/* A ConfigMap's key cannot contain a slash, so the key of `samples/sign.png` is `samples__sign.png`. */}}
{{- define "triton-gateway.configKey" -}}
{{ replace "/" "__" . }}
{{- end }}

{{/* The name has a hash of the content. An upgrade therefore creates a new ConfigMap, and running pods keep their own. */}}
{{- define "triton-gateway.configMapName" -}}
{{- $config := .Values.config -}}
{{- $content := dict "gatewayYaml" $config.gatewayYaml "files" $config.files "binaryFiles" $config.binaryFiles -}}
{{ include "triton-gateway.fullname" . }}-config-{{ toYaml $content | sha256sum | trunc 10 }}
{{- end }}

{{- define "triton-gateway.configItems" -}}
{{- range concat (list "gateway.yaml") (keys .Values.config.files | sortAlpha) (keys .Values.config.binaryFiles | sortAlpha) }}
- key: {{ include "triton-gateway.configKey" . }}
  path: {{ . }}
{{- end }}
{{- end }}
