{{/* Mounts Secrets as files, which the gateway reloads when they change. Mounts whole folders, because a `subPath` is never updated. */}}
{{- define "triton-gateway.secretMounts" -}}
{{- if .Values.gateway.apiKeys.secretName }}
- name: api-keys
  mountPath: /etc/triton-gateway-keys
  readOnly: true
{{- end }}
{{- if include "triton-gateway.privateCaPath" . }}
- name: private-ca
  mountPath: /etc/private-ca
  readOnly: true
{{- end }}
{{- if .Values.triton.external.tls.secretName }}
- name: triton-tls
  mountPath: /etc/triton-tls
  readOnly: true
{{- end }}
{{- if .Values.triton.external.token.secretName }}
- name: triton-token
  mountPath: /etc/triton-token
  readOnly: true
{{- end }}
{{- end }}

{{/* Readable only for the group of the pod. */}}
{{- define "triton-gateway.secretVolumes" -}}
{{- if .Values.gateway.apiKeys.secretName }}
- name: api-keys
  secret:
    secretName: {{ .Values.gateway.apiKeys.secretName }}
    defaultMode: 0440
    items:
      - key: {{ .Values.gateway.apiKeys.secretKey }}
        path: keys.yaml
{{- end }}
{{- with .Values.privateCa.configMapName }}
- name: private-ca
  configMap:
    name: {{ . }}
    items:
      - key: {{ $.Values.privateCa.key }}
        path: ca.crt
{{- end }}
{{- with .Values.privateCa.secretName }}
- name: private-ca
  secret:
    secretName: {{ . }}
    defaultMode: 0440
    items:
      - key: {{ $.Values.privateCa.key }}
        path: ca.crt
{{- end }}
{{- if .Values.triton.external.tls.secretName }}
- name: triton-tls
  secret:
    secretName: {{ .Values.triton.external.tls.secretName }}
    defaultMode: 0440
{{- end }}
{{- if .Values.triton.external.token.secretName }}
- name: triton-token
  secret:
    secretName: {{ .Values.triton.external.token.secretName }}
    defaultMode: 0440
    items:
      - key: {{ .Values.triton.external.token.secretKey }}
        path: token
{{- end }}
{{- end }}

{{/* Path of the private certificate authority in the gateway's container; empty without one. */}}
{{- define "triton-gateway.privateCaPath" -}}
{{ or .Values.privateCa.configMapName .Values.privateCa.secretName | empty | ternary "" "/etc/private-ca/ca.crt" }}
{{- end }}
