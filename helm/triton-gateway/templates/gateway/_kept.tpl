{{/* The ConfigMaps of pods that an upgrade replaces. Helm would delete them at once, but such a pod may have to start
     again, on another node or because the upgrade fails. Only Helm with access to a cluster can look them up. */}}
{{- define "triton-gateway.keptConfigMaps" -}}
{{- $new := include "triton-gateway.configMapName" . -}}
{{- $names := list -}}
{{- range (lookup "apps/v1" "ReplicaSet" .Release.Namespace "").items -}}
{{- $labels := default dict .metadata.labels -}}
{{- $isOfRelease := eq (dig "app.kubernetes.io/instance" "" $labels) $.Release.Name -}}
{{- if and $isOfRelease (eq (dig "app.kubernetes.io/component" "" $labels) "gateway") (dig "status" "replicas" 0 .) -}}
{{- range default list .spec.template.spec.volumes -}}
{{- if eq .name "config" -}}
{{- $names = append $names .configMap.name -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- range without (uniq $names) $new }}
{{- with lookup "v1" "ConfigMap" $.Release.Namespace . }}
---
{{ pick . "apiVersion" "kind" "data" "binaryData" | toYaml }}
metadata:
  name: {{ .metadata.name }}
  labels:
    {{- toYaml .metadata.labels | nindent 4 }}
{{- end }}
{{- end }}
{{- end }}
