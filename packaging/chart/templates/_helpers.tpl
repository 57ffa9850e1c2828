{{- define "slipstream.labels" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "slipstream.metadata" -}}
name: {{ .Release.Name }}
labels:
  {{- include "slipstream.labels" . | nindent 2 }}
{{- end }}

{{- /* The server's words. Kubernetes replaces $(NAME), so each $ of a value is doubled. */ -}}
{{- define "slipstream.args" -}}
{{- $words := concat (list "serve" .Values.model) .Values.args -}}
{{- range $word := $words }}
- {{ $word | replace "$" "$$" | quote }}
{{- end }}
{{- $own := list "--host" "0.0.0.0" "--port" "8000" "--drain-timeout" (toString .Values.drainTimeoutSeconds) -}}
{{- if .Values.kvEvents.enabled -}}
{{- range $word := .Values.args -}}
{{- if regexMatch "^--block[-_]size(=|$)" $word }}{{ fail "args: leave --block-size out; with kvEvents it is kvEvents.blockSize" }}{{ end -}}
{{- end -}}
{{- $topic := printf "kv@$(POD_IP):8000@%s" .Values.model -}}
{{- $events := dict "enable_kv_cache_events" true "publisher" "zmq" "endpoint" (printf "tcp://*:%v" .Values.kvEvents.port) "topic" $topic -}}
{{- $own = concat $own (list "--block-size" (toString .Values.kvEvents.blockSize) "--kv-events-config" (toJson $events)) -}}
{{- end -}}
{{- if .Values.keySecret -}}
{{- $own = concat $own (list "--api-key-file" "/run/slipstream/keys/keys") -}}
{{- else -}}
{{- $name := .Release.Name -}}{{- $pods := printf "*.%s-replicas" $name -}}{{- $here := "$(POD_NAMESPACE)" -}}
{{- $hosts := list $name (printf "%s.%s" $name $here) $pods (printf "%s.%s" $pods $here) (printf "*.%s.svc" $here) (printf "*.%s.svc.cluster.local" $here) -}}
{{- $own = concat $own (list "--allowed-hosts") $hosts .Values.allowedHosts .Values.gateway.hostnames -}}
{{- end -}}
{{- range $own }}
- {{ . | quote }}
{{- end }}
{{- end }}
