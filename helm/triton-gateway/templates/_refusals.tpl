{{/* Checks that the schema cannot express: values that depend on each other. */}}
{{- define "triton-gateway.refuse" -}}
{{- $models := .Values.triton.models -}}
{{- if and (not .Values.triton.enabled) (not .Values.triton.external.grpcUrl) -}}
{{ fail "triton.external.grpcUrl is needed with triton.enabled: false" }}
{{- end -}}
{{- if and .Values.triton.enabled .Values.triton.external.grpcUrl -}}
{{ fail "triton.external.grpcUrl is not used: set triton.enabled: false" }}
{{- end -}}
{{- $external := .Values.triton.external -}}
{{- if and .Values.triton.enabled (or $external.tls.enabled $external.token.secretName) -}}
{{ fail "triton.external is not used: set triton.enabled: false" }}
{{- end -}}
{{- if and (or $external.tls.secretName $external.tls.clientCertificate $external.token.secretName) (not $external.tls.enabled) -}}
{{ fail "triton.external.tls.enabled is needed for its Secret, a client certificate or a token" }}
{{- end -}}
{{- if and $external.tls.clientCertificate (not $external.tls.secretName) -}}
{{ fail "triton.external.tls.secretName is needed with triton.external.tls.clientCertificate" }}
{{- end -}}
{{- if and (eq $models.source "persistentVolumeClaim") (not $models.persistentVolumeClaim.claimName) -}}
{{ fail "triton.models.persistentVolumeClaim.claimName is needed with triton.models.source: persistentVolumeClaim" }}
{{- end -}}
{{- if and (eq $models.source "objectStore") (not $models.objectStore.url) -}}
{{ fail "triton.models.objectStore.url is needed with triton.models.source: objectStore" }}
{{- end -}}
{{- if and (eq $models.source "containerImage") (not $models.containerImage.reference) -}}
{{ fail "triton.models.containerImage.reference is needed with triton.models.source: containerImage" }}
{{- end -}}
{{- if and (eq $models.source "containerImage") (semverCompare "<1.35-0" .Capabilities.KubeVersion.Version) -}}
{{ fail (printf "triton.models.source: containerImage needs Kubernetes 1.35 or newer (image volumes); this is %s" .Capabilities.KubeVersion.Version) }}
{{- end -}}
{{- if ne (eq .Values.config.source "inline") (not (empty .Values.config.gatewayYaml)) -}}
{{ fail "config.source: inline and config.gatewayYaml need each other" }}
{{- end -}}
{{- if and (ne .Values.config.source "inline") (or .Values.config.files .Values.config.binaryFiles) -}}
{{ fail "config.files and config.binaryFiles are not used: set config.source: inline" }}
{{- end -}}
{{- if and (gt (int .Values.gateway.workers) 1) (ne .Values.tracing.explain "none") -}}
{{ fail "tracing.explain needs gateway.workers: 1" }}
{{- end -}}
{{- if and .Values.autoscaling.enabled (gt (int .Values.autoscaling.minReplicas) (int .Values.autoscaling.maxReplicas)) -}}
{{ fail "autoscaling.minReplicas is above autoscaling.maxReplicas" }}
{{- end -}}
{{- $service := .Values.service -}}
{{- if and (ne $service.type "LoadBalancer") (or $service.loadBalancerClass $service.loadBalancerSourceRanges) -}}
{{ fail "service.loadBalancerClass and service.loadBalancerSourceRanges need service.type: LoadBalancer" }}
{{- end -}}
{{- if and (eq $service.type "ClusterIP") $service.externalTrafficPolicy -}}
{{ fail "service.externalTrafficPolicy needs service.type: NodePort or LoadBalancer" }}
{{- end -}}
{{- $keda := and .Values.autoscaling.enabled (eq .Values.autoscaling.engine "keda") -}}
{{- $isScraped := or .Values.podMonitor.enabled .Values.serviceMonitor.enabled -}}
{{- if and $keda (not (and .Values.autoscaling.prometheusUrl $isScraped)) -}}
{{ fail "autoscaling.engine: keda needs autoscaling.prometheusUrl and podMonitor.enabled or serviceMonitor.enabled: its query names the monitor's job" }}
{{- end -}}
{{- if and .Values.ingress.enabled (not .Values.ingress.hosts) -}}
{{ fail "ingress.hosts is needed with ingress.enabled" }}
{{- end -}}
{{- if and .Values.httpRoute.enabled (not .Values.httpRoute.parentRefs) -}}
{{ fail "httpRoute.parentRefs is needed with httpRoute.enabled" }}
{{- end -}}
{{- if and .Values.networkPolicy.enabled (not .Values.networkPolicy.monitoring) -}}
{{ fail "networkPolicy.monitoring is needed with networkPolicy.enabled: without it, every pod could read the metrics" }}
{{- end -}}
{{- if regexMatch "^/+(tmp|dev/+shm)(/|$)" (clean $models.path) -}}
{{ fail (printf "triton.models.path: %s is a folder that Triton writes to; choose another one" $models.path) }}
{{- end -}}
{{- $files := concat (list "gateway.yaml") (keys (default dict .Values.config.files)) (keys (default dict .Values.config.binaryFiles)) -}}
{{- $keys := dict -}}
{{- range $files -}}
{{- $key := include "triton-gateway.configKey" . -}}
{{- if hasKey $keys $key -}}
{{ fail (printf "config.files and config.binaryFiles: the paths '%s' and '%s' have the same key '%s' in a ConfigMap" (get $keys $key) . $key) }}
{{- end -}}
{{- $_ := set $keys $key . -}}
{{- end -}}
{{- $labels := include "triton-gateway.ownLabels" . | fromYaml -}}
{{- range concat (keys (default dict .Values.podLabels)) (keys (default dict .Values.commonLabels)) -}}
{{- if hasKey $labels . -}}
{{ fail (printf "podLabels and commonLabels: '%s' is a label that the chart sets, and selects the pods by" .) }}
{{- end -}}
{{- end -}}
{{- range keys (default dict .Values.podLabels) -}}
{{- if hasKey (default dict $.Values.commonLabels) . -}}
{{ fail (printf "podLabels and commonLabels: '%s' is in both" .) }}
{{- end -}}
{{- end -}}
{{- range $name := list "podMonitor" "serviceMonitor" -}}
{{- $monitor := get $.Values $name -}}
{{- if gt (int $monitor.timeoutSeconds) (int $monitor.intervalSeconds) -}}
{{ fail (printf "%s.timeoutSeconds is above %s.intervalSeconds, which Prometheus refuses" $name $name) }}
{{- end -}}
{{- end -}}
{{- if and .Values.autoscaling.authModes (not .Values.autoscaling.authenticationRef) -}}
{{ fail "autoscaling.authModes needs autoscaling.authenticationRef" }}
{{- end -}}
{{- if and .Values.resourceClaims (not .Values.triton.enabled) -}}
{{ fail "resourceClaims are for the sidecar: they need triton.enabled" }}
{{- end -}}
{{- if and .Values.resourceClaims (semverCompare "<1.34-0" .Capabilities.KubeVersion.Version) -}}
{{ fail (printf "resourceClaims need Kubernetes 1.34 or newer; this is %s" .Capabilities.KubeVersion.Version) }}
{{- end -}}
{{- if and .Values.prometheusRule.enabled (not $isScraped) -}}
{{ fail "prometheusRule.enabled needs podMonitor.enabled or serviceMonitor.enabled: its alerts name the monitor's job" }}
{{- end -}}
{{- if and .Values.podMonitor.enabled .Values.serviceMonitor.enabled -}}
{{ fail "podMonitor.enabled and serviceMonitor.enabled: choose one, because Prometheus would read each metric twice" }}
{{- end -}}
{{- $budget := .Values.podDisruptionBudget -}}
{{- $pods := .Values.autoscaling.enabled | ternary .Values.autoscaling.minReplicas .Values.replicaCount | int -}}
{{- if and $budget.enabled $budget.minAvailable $pods -}}
{{- $text := toString $budget.minAvailable -}}
{{- $percent := hasSuffix "%" $text | ternary (trimSuffix "%" $text | int) 0 -}}
{{- $kept := hasSuffix "%" $text | ternary (div (add (mul $percent $pods) 99) 100) (int $text) -}}
{{- if ge (int $kept) $pods -}}
{{ fail (printf "podDisruptionBudget.minAvailable: %s of %d pods would block every drain of a node" $text $pods) }}
{{- end -}}
{{- end -}}
{{- if and .Values.redis.enabled .Values.gateway.redis.secretName -}}
{{ fail "redis.enabled and gateway.redis.secretName: choose one" }}
{{- end -}}
{{- if and .Values.redis.enabled (not .Values.networkPolicy.enabled) -}}
{{ fail "redis.enabled needs networkPolicy.enabled: that Redis has no password" }}
{{- end -}}
{{- if and .Values.privateCa.configMapName .Values.privateCa.secretName -}}
{{ fail "privateCa.configMapName and privateCa.secretName: choose one" }}
{{- end -}}
{{- if and .Values.tests.pipeline (not .Values.tests.body) -}}
{{ fail "tests.body is needed with tests.pipeline" }}
{{- end -}}
{{- end }}
