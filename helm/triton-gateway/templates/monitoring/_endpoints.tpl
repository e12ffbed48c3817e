{{/* Takes a list of a monitor's values, relabelings of the chart, and the root context. Returns an endpoint for each port. */}}
{{- define "triton-gateway.endpoints" -}}
{{- $monitor := index . 0 -}}
{{- $relabelings := concat (index . 1) $monitor.relabelings -}}
{{- range (index . 2).Values.triton.enabled | ternary (list "admin" "triton-metrics") (list "admin") }}
- port: {{ . }}
  path: /metrics
  interval: {{ $monitor.intervalSeconds }}s
  {{- with $monitor.timeoutSeconds }}
  scrapeTimeout: {{ . }}s
  {{- end }}
  {{- with $relabelings }}
  relabelings:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $monitor.metricRelabelings }}
  metricRelabelings:
    {{- toYaml . | nindent 4 }}
  {{- end }}
{{- end }}
{{- end }}
