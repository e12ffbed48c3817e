{{- define "triton-gateway.redisName" -}}
{{ include "triton-gateway.fullname" . }}-redis
{{- end }}

{{- define "triton-gateway.redisSelectorLabels" -}}
app.kubernetes.io/name: {{ include "triton-gateway.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: redis
{{- end }}
