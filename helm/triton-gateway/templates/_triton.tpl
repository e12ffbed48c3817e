{{/* Triton as a native sidecar, so that it starts before the gateway and stops after it. */}}
{{- define "triton-gateway.tritonContainer" -}}
name: triton
image: {{ include "triton-gateway.image" (list .Values.triton.image .) }}
imagePullPolicy: {{ .Values.triton.image.pullPolicy }}
restartPolicy: Always
command:
  - sh
  - -c
  - |
    {{- .Files.Get "files/triton_init.sh" | trim | nindent 4 }}
  - triton_init
  # Triton ends by itself within --exit-timeout-secs, unless it hangs.
  - {{ add .Values.shutdown.tritonExitSeconds 5 | quote }}
  - {{ .Values.triton.entryPoint | quote }}
args:
  - tritonserver
  - --model-repository={{ include "triton-gateway.modelRepository" . }}
  # Serve every model that can be loaded. The gateway decides which models the readiness of the pod requires.
  - --model-control-mode=explicit
  - --load-model=*
  - --exit-on-error=false
  {{- if not .Values.triton.autoCompleteConfig }}
  - --disable-auto-complete-config
  {{- end }}
  - --grpc-address=127.0.0.1
  - --grpc-port=8001
  - --http-address=127.0.0.1
  - --http-port=8000
  - --metrics-address=0.0.0.0
  - --metrics-port=8002
  - --exit-timeout-secs={{ .Values.shutdown.tritonExitSeconds }}
  {{- if and (include "triton-gateway.sharesMemory" .) .Values.triton.sharedMemory.allowOption }}
  - --allow-client-shm=true
  {{- end }}
  {{- $explains := has .Values.tracing.explain (empty .Values.gateway.apiKeys.secretName | ternary (list "everyone") (list "keys" "everyone")) }}
  {{- if or $explains .Values.tracing.otlpEndpoint }}
  - --trace-config=mode=opentelemetry
  {{- if $explains }}
  # The gateway keeps the spans of explained requests, and forwards all of them to the collector.
  - --trace-config=opentelemetry,url=http://127.0.0.1:8081/v1/traces
  - --trace-config=opentelemetry,bsp_schedule_delay=100
  {{- else }}
  - --trace-config=opentelemetry,url={{ trimSuffix "/" .Values.tracing.otlpEndpoint }}/v1/traces
  {{- end }}
  - --trace-config=level=TIMESTAMPS
  # The rate applies only to requests without a parent span. Requests with a sampled parent are always recorded.
  - --trace-config=rate=2147483647
  {{- end }}
  {{- with .Values.triton.maxQueuedResponses }}
  - --grpc-max-response-pool-size={{ . }}
  {{- end }}
  {{- with .Values.triton.extraArgs }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
ports:
  - name: triton-metrics
    containerPort: 8002
# Commands in the container: Triton's API listens on loopback, and HTTP probes of the kubelet use the pod's address.
startupProbe:
  exec:
    command:
      - curl
      - --fail
      - --silent
      - --max-time
      - "4"
      - http://127.0.0.1:8000/v2/health/live
  periodSeconds: 2
  timeoutSeconds: 5
  failureThreshold: {{ div (add .Values.triton.startupSeconds 1) 2 }}
  terminationGracePeriodSeconds: {{ include "triton-gateway.hungSeconds" . }}
livenessProbe:
  exec:
    command:
      - sh
      - -c
      # A thread that blocks only SIGABRT or SIGSEGV runs Triton's crash handler, which can hang while Triton seems live.
      # The gateway's 503 means that Triton is live but stuck. An unresponsive gateway must not restart Triton.
      - >-
        ! grep -qsE '^SigBlk:.0+(20|400|420)$' /proc/[0-9]*/task/*/status &&
        curl --fail --silent --max-time 4 http://127.0.0.1:8000/v2/health/live &&
        test "$(curl --silent --max-time 2 --output /dev/null --write-out '%{http_code}' http://127.0.0.1:8081/health/triton)" != 503
  {{- include "triton-gateway.probeTimes" (list .Values.triton.livenessProbe (dict "periodSeconds" 10 "timeoutSeconds" 8 "failureThreshold" 6)) | nindent 2 }}
  terminationGracePeriodSeconds: {{ include "triton-gateway.hungSeconds" . }}
{{- $earlyExitKey := .Values.gateway.earlyExitKey }}
{{- $logsTensors := eq .Values.gateway.logTensors "shapes" }}
{{- if or .Values.triton.env $earlyExitKey.secretName $logsTensors }}
env:
  {{- if $logsTensors }}
  - name: GATEWAY_LOG_TENSORS
    value: shapes
  {{- end }}
  {{- with $earlyExitKey.secretName }}
  - name: EARLY_EXIT_KEY
    valueFrom:
      secretKeyRef:
        name: {{ . }}
        key: {{ $earlyExitKey.secretKey }}
  {{- end }}
  {{- with .Values.triton.env }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- end }}
{{- $bucketSecret := eq .Values.triton.models.source "objectStore" | ternary .Values.triton.models.objectStore.secretName "" }}
{{- $envFrom := empty $bucketSecret | ternary list (list (dict "secretRef" (dict "name" $bucketSecret))) }}
{{- with concat $envFrom .Values.triton.envFrom }}
envFrom:
  {{- toYaml . | nindent 2 }}
{{- end }}
resources:
  {{- include "triton-gateway.tritonResources" . | nindent 2 }}
securityContext:
  {{- toYaml .Values.triton.securityContext | nindent 2 }}
volumeMounts:
  - name: shm
    mountPath: /dev/shm
  - name: triton-tmp
    mountPath: /tmp
  {{- with .Values.triton.extraVolumeMounts }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
  {{- if has .Values.triton.models.source (list "persistentVolumeClaim" "containerImage") }}
  - name: models
    mountPath: {{ .Values.triton.models.path }}
    readOnly: true
    {{- if eq .Values.triton.models.source "persistentVolumeClaim" }}
    {{- with .Values.triton.models.persistentVolumeClaim.subPath }}
    subPath: {{ . }}
    {{- end }}
    {{- end }}
  {{- end }}
{{- end }}

{{/* Whether gateway and sidecar exchange large tensors through /dev/shm. If so, both mount it. */}}
{{- define "triton-gateway.sharesMemory" -}}
{{ and .Values.triton.enabled (gt (int64 .Values.triton.sharedMemory.bytes) 0) | ternary "true" "" }}
{{- end }}

{{- define "triton-gateway.modelRepository" -}}
{{ eq .Values.triton.models.source "objectStore" | ternary .Values.triton.models.objectStore.url .Values.triton.models.path }}
{{- end }}

{{- define "triton-gateway.tritonResources" -}}
{{- $resources := deepCopy (default dict .Values.triton.resources) -}}
{{- if gt (int .Values.triton.gpus) 0 -}}
{{- $limits := merge (dict .Values.triton.gpuResource (int .Values.triton.gpus)) (default (dict) $resources.limits) -}}
{{- $_ := set $resources "limits" $limits -}}
{{- end -}}
{{- with .Values.resourceClaims -}}
{{- $claims := list -}}
{{- range . -}}
{{- $claims = append $claims (pick . "name") -}}
{{- end -}}
{{- $_ := set $resources "claims" $claims -}}
{{- end -}}
{{ toYaml $resources }}
{{- end }}

{{/* Nodes have a taint for GPUs, not for the slices or shares of one: NVIDIA's resources have one taint. */}}
{{- define "triton-gateway.gpuTaint" -}}
{{ hasPrefix "nvidia.com/" .Values.triton.gpuResource | ternary "nvidia.com/gpu" .Values.triton.gpuResource }}
{{- end }}

{{- define "triton-gateway.tritonVolumes" -}}
- name: shm
  emptyDir:
    medium: Memory
    sizeLimit: {{ .Values.triton.shmSize }}
- name: triton-tmp
  emptyDir:
    sizeLimit: {{ .Values.triton.tmpSize }}
{{- with .Values.triton.models }}
{{- if eq .source "persistentVolumeClaim" }}
- name: models
  persistentVolumeClaim:
    claimName: {{ .persistentVolumeClaim.claimName }}
    readOnly: true
{{- else if eq .source "containerImage" }}
- name: models
  image:
    reference: {{ .containerImage.reference }}
    pullPolicy: {{ .containerImage.pullPolicy }}
{{- end }}
{{- end }}
{{- end }}
