{{- define "triton-gateway.testLabels" -}}
app.kubernetes.io/name: {{ include "triton-gateway.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: test
{{- end }}
