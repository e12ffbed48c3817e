# Two images, which contain only locked packages:
#   docker build -t triton-gateway:0.1.0 .
#   docker build -t triton-gateway-models:0.1.0 --target triton .
# BASE_IMAGE: any image with glibc and Python 3.11 to 3.14 as python3, with venv and pip. The locked wheels need glibc.
ARG BASE_IMAGE=python:3.13-slim-bookworm
# NVIDIA's Triton image. The reference models need its Python backend, and numpy 1.26 needs Python 3.10 to 3.12.
ARG TRITON_BASE_IMAGE=nvcr.io/nvidia/tritonserver:26.10-py3

FROM ${TRITON_BASE_IMAGE} AS triton-packages
WORKDIR /build
COPY requirements/triton.txt .
# Without nvidia-pytriton, which contains a second Triton: the base image is the server. The packages are in a separate
# folder, so that those of the base image do not change. A .pth file in the base's site-packages puts the folder first on
# the path of every Python, also in model processes of Triton before 24.11, which ignore PYTHONPATH.
RUN sed '/^nvidia-pytriton==/,/[^\\]$/d' triton.txt > models.txt \
    && python3 -m pip install --no-cache-dir --require-hashes --no-deps --only-binary=:all: \
        --target /opt/model-packages --requirement models.txt
COPY model_kit/src/ /opt/model-packages/
RUN folder="/opt/site$(python3 -c 'import site; print(site.getsitepackages()[0])')" \
    && mkdir -p "$folder" \
    && echo "import sys; sys.path.insert(0, '/opt/model-packages')" > "$folder/model-packages.pth"

FROM ${TRITON_BASE_IMAGE} AS triton
ARG VERSION=0.0.0
ARG REVISION=unknown
LABEL org.opencontainers.image.title="triton-gateway-models" \
      org.opencontainers.image.description="NVIDIA Triton with the reference models of triton-gateway" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"
COPY --from=triton-packages /opt/model-packages /opt/model-packages
COPY --from=triton-packages /opt/site/ /
COPY triton_models /models
# One thread per model process, because many processes share the cores.
ENV PYTHONDONTWRITEBYTECODE=1 \
    HOME=/tmp \
    OMP_NUM_THREADS=1 \
    OPENBLAS_NUM_THREADS=1
USER 10001:10001
EXPOSE 8000 8001 8002
HEALTHCHECK --interval=10s --timeout=5s --start-period=10m CMD ["curl", "--fail", "--silent", "http://127.0.0.1:8000/v2/health/live"]
# The entry point of the base image sets up CUDA's compatibility libraries and runs this command.
CMD ["tritonserver", "--model-repository=/models", "--disable-auto-complete-config"]

FROM ${BASE_IMAGE} AS build
WORKDIR /build
# Optional features. docs/how-to/install.md says what each costs.
ARG EXTRAS="redis tokenizers jsonschema-rs"
COPY requirements/build.txt requirements/gateway.txt requirements/slim.py requirements/
RUN for extra in jsonschema-rs redis tokenizers; do \
        case " ${EXTRAS} " in \
            *" ${extra} "*) ;; \
            *) sed -i "/^${extra}==/,/[^\\]$/d" requirements/gateway.txt ;; \
        esac; \
    done \
    && python3 -m venv tools \
    && tools/bin/pip install --no-cache-dir --require-hashes --only-binary=:all: --requirement requirements/build.txt \
    && python3 -m venv --without-pip /opt/triton-gateway \
    && tools/bin/pip --python /opt/triton-gateway/bin/python3 install \
        --no-cache-dir --require-hashes --no-deps --only-binary=:all: --requirement requirements/gateway.txt \
    && python3 requirements/slim.py /opt/triton-gateway/lib
COPY pyproject.toml README.md LICENSE NOTICE ./
COPY app app
RUN tools/bin/pip wheel --no-cache-dir --no-deps --no-build-isolation --wheel-dir wheels . \
    && tools/bin/pip --python /opt/triton-gateway/bin/python3 install --no-cache-dir --no-deps --no-index wheels/*.whl

FROM ${BASE_IMAGE} AS gateway
ARG VERSION=0.0.0
ARG REVISION=unknown
LABEL org.opencontainers.image.title="triton-gateway" \
      org.opencontainers.image.description="JSON, files, token streams, WebSockets and OpenAI's API for the models that NVIDIA Triton serves" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"
COPY --from=build /opt/triton-gateway /opt/triton-gateway
# The pipelines of the reference models, for GATEWAY_CONFIG=gateway.yaml.
WORKDIR /app
COPY gateway.yaml .
COPY samples samples
ENV PATH=/opt/triton-gateway/bin:${PATH} \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    GATEWAY_HOST=0.0.0.0
USER 10001:10001
EXPOSE 8080 8081
HEALTHCHECK --interval=10s --timeout=5s --start-period=60s CMD ["/opt/triton-gateway/bin/python3", "-c", \
    "import os, urllib.request as r; r.urlopen('http://127.0.0.1:%s/health/live' % os.environ.get('GATEWAY_ADMIN_PORT', 8081))"]
ENTRYPOINT ["/opt/triton-gateway/bin/triton-gateway"]
CMD ["serve"]
