{{- define "triton-gateway.gatewayContainer" -}}
name: gateway
{{ include "triton-gateway.gatewayProgram" . }}
ports:
  - name: http
    containerPort: 8080
  - name: admin
    containerPort: 8081
{{- with .Values.gateway.lifecycle }}
lifecycle:
  {{- toYaml . | nindent 2 }}
{{- end }}
startupProbe:
  httpGet:
    path: /health/live
    port: admin
  {{- include "triton-gateway.probeTimes" (list .Values.gateway.startupProbe (dict "periodSeconds" 1 "failureThreshold" 60)) | nindent 2 }}
  terminationGracePeriodSeconds: {{ include "triton-gateway.hungSeconds" . }}
# Independent of Triton and the models, because slow loading must never restart the gateway.
livenessProbe:
  httpGet:
    path: /health/live
    port: admin
  {{- include "triton-gateway.probeTimes" (list .Values.gateway.livenessProbe (dict "periodSeconds" 10 "timeoutSeconds" 5 "failureThreshold" 6)) | nindent 2 }}
  terminationGracePeriodSeconds: {{ include "triton-gateway.hungSeconds" . }}
readinessProbe:
  httpGet:
    path: /health/ready
    port: admin
  {{- include "triton-gateway.probeTimes" (list .Values.gateway.readinessProbe (dict "periodSeconds" 5 "timeoutSeconds" 3 "failureThreshold" 2)) | nindent 2 }}
resources:
  {{- include "triton-gateway.gatewayResources" . | nindent 2 }}
{{- end }}

{{/* Checks the settings, gateway.yaml and the keys before Triton loads its models. Otherwise a mistake shows minutes later. */}}
{{- define "triton-gateway.checkContainer" -}}
name: check
{{ include "triton-gateway.gatewayProgram" . }}
args:
  - serve
  - --check
# The message is in the state of the pod.
terminationMessagePolicy: FallbackToLogsOnError
# The scheduler counts the larger of an init container's requests and those of the containers that run later.
resources:
  {{- include "triton-gateway.gatewayResources" . | nindent 2 }}
{{- end }}

{{/* What the gateway and its check have in common: the image, the variables and the files. */}}
{{- define "triton-gateway.gatewayProgram" -}}
image: {{ include "triton-gateway.image" (list .Values.gateway.image .) }}
imagePullPolicy: {{ .Values.gateway.image.pullPolicy }}
env:
  {{- include "triton-gateway.settings" . | nindent 2 }}
  {{- include "triton-gateway.privateCaVariables" . | nindent 2 }}
  {{- with .Values.gateway.env }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- with .Values.gateway.envFrom }}
envFrom:
  {{- toYaml . | nindent 2 }}
{{- end }}
securityContext:
  {{- toYaml .Values.gateway.securityContext | nindent 2 }}
volumeMounts:
  - name: gateway-tmp
    mountPath: /tmp
  {{- if include "triton-gateway.sharesMemory" . }}
  - name: shm
    mountPath: /dev/shm
  {{- end }}
  {{- if eq .Values.config.source "inline" }}
  - name: config
    mountPath: /etc/triton-gateway
    readOnly: true
  {{- end }}
  {{- include "triton-gateway.secretMounts" . | nindent 2 }}
  {{- with .Values.gateway.extraVolumeMounts }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- end }}

{{/* The configured resources, or defaults for the number of workers and the shared memory. Their parent is one more process. */}}
{{- define "triton-gateway.gatewayResources" -}}
{{- $workers := int .Values.gateway.workers -}}
{{- $several := gt $workers 1 -}}
{{- $memory := $several | ternary (mul 128 $workers) 0 -}}
{{- $requests := dict "cpu" ($several | ternary (toString $workers) "500m") "memory" (printf "%dMi" (add 256 $memory)) -}}
{{- $shared := include "triton-gateway.sharesMemory" . | empty | ternary 0 (int64 .Values.triton.sharedMemory.bytes) -}}
{{- $limits := dict "memory" (printf "%dMi" (add 512 $memory (div (add $shared 1048575) 1048576))) -}}
{{ merge (deepCopy (default dict .Values.gateway.resources)) (dict "requests" $requests "limits" $limits) | toYaml }}
{{- end }}

{{/* The GATEWAY_* variables of the container. The image sets the address to listen on. */}}
{{- define "triton-gateway.settings" -}}
- name: GATEWAY_HOST
  value: {{ has .Values.service.ipFamilyPolicy (list "" "SingleStack") | ternary "0.0.0.0" "::" | quote }}
- name: GATEWAY_PORT
  value: "8080"
- name: GATEWAY_ADMIN_PORT
  value: "8081"
- name: GATEWAY_WORKERS
  value: {{ .Values.gateway.workers | toString | quote }}
- name: GATEWAY_TRITON_URL
  value: {{ .Values.triton.enabled | ternary "127.0.0.1:8001" .Values.triton.external.grpcUrl }}
{{- $metricsUrl := .Values.triton.enabled | ternary "http://127.0.0.1:8002/metrics" .Values.triton.external.metricsUrl }}
{{- with $metricsUrl }}
- name: GATEWAY_TRITON_METRICS_URL
  value: {{ . }}
{{- end }}
- name: GATEWAY_TRITON_REPAIR
  value: {{ and .Values.triton.enabled .Values.triton.repair | toString | quote }}
{{- with include "triton-gateway.configPath" . }}
- name: GATEWAY_CONFIG
  value: {{ . }}
{{- end }}
- name: GATEWAY_SHUTDOWN_DELAY_S
  value: {{ .Values.shutdown.delaySeconds | quote }}
- name: GATEWAY_DRAIN_S
  value: {{ .Values.shutdown.longestStreamSeconds | toString | quote }}
- name: GATEWAY_TIMEOUT_S
  value: {{ .Values.gateway.timeoutSeconds | toString | quote }}
- name: GATEWAY_MAX_BODY_BYTES
  value: {{ .Values.gateway.maxBodyBytes | int64 | toString | quote }}
{{- if include "triton-gateway.sharesMemory" . }}
- name: GATEWAY_SHARED_MEMORY_BYTES
  value: {{ .Values.triton.sharedMemory.bytes | int64 | toString | quote }}
{{- end }}
{{- if .Values.gateway.apiKeys.secretName }}
- name: GATEWAY_API_KEYS_FILE
  value: /etc/triton-gateway-keys/keys.yaml
{{- end }}
{{- $tls := .Values.triton.external.tls }}
{{- if $tls.enabled }}
- name: GATEWAY_TRITON_CA
  value: {{ empty $tls.secretName | ternary (default "system" (include "triton-gateway.privateCaPath" .)) "/etc/triton-tls/ca.crt" }}
{{- end }}
{{- if $tls.clientCertificate }}
- name: GATEWAY_TRITON_CERT
  value: /etc/triton-tls/tls.crt
- name: GATEWAY_TRITON_KEY
  value: /etc/triton-tls/tls.key
{{- end }}
{{- if .Values.triton.external.token.secretName }}
- name: GATEWAY_TRITON_TOKEN_FILE
  value: /etc/triton-token/token
{{- end }}
{{- with .Values.gateway.corsOrigins }}
- name: GATEWAY_CORS_ORIGINS
  value: {{ join "," . | quote }}
{{- end }}
{{- with .Values.gateway.imageHosts }}
- name: GATEWAY_IMAGE_HOSTS
  value: {{ join "," . | quote }}
{{- end }}
- name: GATEWAY_DOCS
  value: {{ .Values.gateway.docs | toString | quote }}
- name: GATEWAY_CONSOLE
  value: {{ .Values.gateway.console | toString | quote }}
- name: GATEWAY_LOG_LEVEL
  value: {{ .Values.gateway.logLevel }}
- name: GATEWAY_LOG_FORMAT
  value: {{ .Values.gateway.logFormat }}
- name: GATEWAY_LOG_TENSORS
  value: {{ .Values.gateway.logTensors | quote }}
{{- with .Values.gateway.tokenizers }}
- name: GATEWAY_TOKENIZERS
  value: {{ . | quote }}
{{- end }}
{{- with .Values.tracing.otlpEndpoint }}
- name: GATEWAY_OTLP_ENDPOINT
  value: {{ . | quote }}
{{- end }}
{{- if eq .Values.tracing.explain "everyone" }}
- name: GATEWAY_EXPLAIN
  value: "true"
{{- end }}
{{- $earlyExitKey := .Values.gateway.earlyExitKey }}
{{- if $earlyExitKey.secretName }}
- name: GATEWAY_EARLY_EXIT_KEY
  valueFrom:
    secretKeyRef:
      name: {{ $earlyExitKey.secretName }}
      key: {{ $earlyExitKey.secretKey }}
{{- end }}
{{- if .Values.redis.enabled }}
- name: GATEWAY_REDIS_URL
  value: redis://{{ include "triton-gateway.redisName" . }}:6379/0
{{- end }}
{{- $redis := .Values.gateway.redis }}
{{- if $redis.secretName }}
- name: GATEWAY_REDIS_URL
  valueFrom:
    secretKeyRef:
      name: {{ $redis.secretName }}
      key: {{ $redis.secretKey }}
{{- end }}
{{- end }}

{{/* Python's TLS reads SSL_CERT_FILE, which Redis uses. The exporter of spans has its own variable. */}}
{{- define "triton-gateway.privateCaVariables" -}}
{{- with include "triton-gateway.privateCaPath" . }}
- name: SSL_CERT_FILE
  value: {{ . }}
- name: OTEL_EXPORTER_OTLP_CERTIFICATE
  value: {{ . }}
{{- end }}
{{- end }}

{{- define "triton-gateway.configPath" -}}
{{ get (dict "image" "/app/gateway.yaml" "inline" "/etc/triton-gateway/gateway.yaml" "models" "") .Values.config.source }}
{{- end }}
