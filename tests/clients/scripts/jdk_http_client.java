// The JDK's own HttpClient with its defaults: each first request offers HTTP/2 by `Upgrade: h2c`.
import java.io.InputStream;
import java.net.URI;
import java.net.http.HttpClient;
import java.net.http.HttpRequest;
import java.net.http.HttpResponse;
import java.nio.charset.StandardCharsets;
import java.util.concurrent.Callable;

class JdkHttpClient {
    static final String BASE_URL = System.getenv("BASE_URL");
    static final String MODEL = System.getenv("MODEL");

    static HttpRequest request(String key, String model, boolean streams, int maxTokens) {
        String body = "{\"model\": \"" + model + "\", \"max_tokens\": " + maxTokens + ", \"stream\": " + streams
            + ", \"messages\": [{\"role\": \"user\", \"content\": \"Say hello.\"}]}";
        return HttpRequest.newBuilder(URI.create(BASE_URL + "/v1/chat/completions"))
            .header("authorization", "Bearer " + key)
            .header("content-type", "application/json")
            .POST(HttpRequest.BodyPublishers.ofString(body))
            .build();
    }

    static int status(String key, String model) throws Exception {
        HttpResponse<String> answer = HttpClient.newHttpClient()
            .send(request(key, model, false, 8), HttpResponse.BodyHandlers.ofString());
        check(answer.body().contains("\"error\""), answer.body());
        return answer.statusCode();
    }

    static void check(boolean holds, String otherwise) {
        if (!holds) throw new IllegalStateException(otherwise);
    }

    static void report(String capability, Callable<Void> action) {
        String note = "";
        try {
            action.call();
        } catch (Exception error) {
            error.printStackTrace();
            note = error.toString().replaceAll("[^ -~]|[\"\\\\]", " ");
        }
        System.out.println("{\"capability\": \"" + capability + "\", \"ok\": " + note.isEmpty()
            + ", \"note\": \"" + note + "\"}");
    }

    public static void main(String[] arguments) {
        String key = System.getenv("API_KEY");
        System.out.println("{\"version\": \"" + System.getProperty("java.version") + "\"}");
        report("chat", () -> {
            HttpClient client = HttpClient.newHttpClient();
            for (int turn = 0; turn < 2; turn++) {
                HttpResponse<String> answer =
                    client.send(request(key, MODEL, false, 8), HttpResponse.BodyHandlers.ofString());
                check(answer.statusCode() == 200, answer.body());
                check(answer.body().contains("\"chat.completion\""), answer.body());
            }
            return null;
        });
        report("stream", () -> {
            HttpResponse<java.util.stream.Stream<String>> answer = HttpClient.newHttpClient()
                .send(request(key, MODEL, true, 8), HttpResponse.BodyHandlers.ofLines());
            check(answer.statusCode() == 200, "status " + answer.statusCode());
            check(answer.body().anyMatch("data: [DONE]"::equals), "no end");
            return null;
        });
        report("errors", () -> {
            check(status("wrong", MODEL) == 401, "a wrong key");
            check(status(key, "no-such-model") == 404, "an unknown model");
            return null;
        });
        report("cancel", () -> {
            HttpClient client = HttpClient.newHttpClient();
            try (InputStream body =
                client.send(request(key, MODEL, true, 2000), HttpResponse.BodyHandlers.ofInputStream()).body()) {
                String begun = new String(body.readNBytes(20), StandardCharsets.UTF_8);
                check(begun.startsWith("data: "), begun);
            }
            HttpResponse<String> next =
                client.send(request(key, MODEL, false, 8), HttpResponse.BodyHandlers.ofString());
            check(next.statusCode() == 200, next.body());
            return null;
        });
        System.exit(0);
    }
}
