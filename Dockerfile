# Two images, by `--target`: `host` (the last one, so the default) for the public host, without torch, and `gpu` for
# heads and tails. Both bring shardq in an environment of its own, built apart, so that no build tool stays.
FROM python:3.12-slim AS sources
WORKDIR /src
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY examples examples
COPY cli cli
COPY relay relay
COPY shardq shardq
COPY storage storage
COPY tasks tasks
COPY workers workers

FROM sources AS host-build
RUN python -m venv --without-pip /opt/shardq \
    && pip --python /opt/shardq/bin/python install --no-cache-dir -c constraints.txt '.[server,postgres]'

# torch's own wheels bring CUDA; of the machine only the driver is needed
FROM sources AS gpu-build
RUN python -m venv --without-pip /opt/shardq \
    && pip --python /opt/shardq/bin/python install --no-cache-dir -c constraints.txt '.[gpu]'

FROM python:3.12-slim AS gpu
# Triton compiles small launchers for its kernels
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --uid 1000 shardq \
    && install -d -o shardq -g shardq -m 700 /data
COPY --from=gpu-build /opt/shardq /opt/shardq
USER shardq
ENV PATH=/opt/shardq/bin:$PATH SHARDQ_DATA_DIR=/data SHARDQ_CACHE_DIR=/data/cache HF_HOME=/data/hub PYTHONUNBUFFERED=1
VOLUME /data
WORKDIR /data
CMD ["shardq", "--help"]

FROM python:3.12-slim AS host
RUN useradd --create-home --uid 1000 shardq \
    && install -d -o shardq -g shardq -m 700 /data
COPY --from=host-build /opt/shardq /opt/shardq
USER shardq
ENV PATH=/opt/shardq/bin:$PATH SHARDQ_DATA_DIR=/data PYTHONUNBUFFERED=1
VOLUME /data
WORKDIR /data
CMD ["shardq", "--help"]
